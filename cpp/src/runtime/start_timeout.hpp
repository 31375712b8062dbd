// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <span>
#include <string>

#include <paceline/runtime/device.hpp>

namespace paceline::internal {

/// How long the workers of these devices may take to start, all together. The worker of a GPU begins with the GPU's
/// context, which may take seconds for each one, and the driver makes one after the other.
[[nodiscard]] std::chrono::seconds start_timeout(std::span<const Device> devices) noexcept;

/// The message for a worker that took longer.
[[nodiscard]] std::string late_start(const Device& device, std::chrono::seconds timeout);

}  // namespace paceline::internal
