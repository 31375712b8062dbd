// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <paceline/runtime/async.hpp>

namespace paceline::cuda {

/// Streams, events and memory of the GPU with this ordinal.
/// @throws Unavailable without a driver, Error if the device refuses.
[[nodiscard]] std::unique_ptr<AsyncDevice> open_device(int ordinal);

}  // namespace paceline::cuda
