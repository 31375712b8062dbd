// SPDX-License-Identifier: Apache-2.0
#include "runtime/start_timeout.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace paceline::internal {

std::chrono::seconds start_timeout(std::span<const Device> devices) noexcept {
  const auto is_gpu = [](const Device& device) { return device.kind == DeviceKind::cuda; };
  return std::chrono::seconds(std::ranges::any_of(devices, is_gpu) ? 120 : 10);
}

std::string late_start(const Device& device, std::chrono::seconds timeout) {
  const std::string late =
      fmt::format("DeviceGroup: the worker of {} did not start within {} s. ", device.name, timeout.count());
  if (device.kind == DeviceKind::cuda) {
    return late + fmt::format(
                      "It waits for the driver to make a context on {}, which takes seconds at most. Does nvidia-smi "
                      "answer? Without the driver's persistence mode (nvidia-smi -pm 1) every start also initialises "
                      "the GPU. A GPU with an error (nvidia-smi -q, dmesg for Xid) may hang here: leave it out by "
                      "CUDA_VISIBLE_DEVICES.",
                      device.memory_space);
  }
  return late +
         fmt::format("Is another process holding its core {} at a real-time priority?", fmt::join(device.cores, ", "));
}

}  // namespace paceline::internal
