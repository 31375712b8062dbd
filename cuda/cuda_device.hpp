// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <paceline/runtime/async_device.hpp>

namespace paceline::cuda {

class GreenContext;

/// Streams, events and memory of the GPU with this ordinal. With a `part`, the streams run on that part of the GPU, and
/// all else belongs to the whole GPU.
/// @throws Unavailable without a driver, Error if the device refuses.
[[nodiscard]] std::unique_ptr<AsyncDevice> open_device(int ordinal, std::shared_ptr<GreenContext> part = nullptr);

}  // namespace paceline::cuda
