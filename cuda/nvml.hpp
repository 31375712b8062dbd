// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <paceline/runtime/device_health.hpp>

namespace paceline::cuda {

/// NVIDIA's management library, which reports the state of a GPU. It is never linked. The first question opens it, and
/// it stays open. A copy that is already in the process (PyTorch's, NCCL's) is used.
///
/// NVML's calls have no deadline. A driver that hangs, for example after a GPU fell off the bus, never returns from
/// them. So each question runs on a thread of its own. A thread that does not return in time is left behind. Nothing
/// else is asked until it returns, so there is at most one such thread. Any thread may ask. Questions run one after the
/// other.
class Nvml {
 public:
  /// The one of this process.
  [[nodiscard]] static Nvml& of_process();

  /// @param limit the deadline of a question. Without persistence mode NVML takes seconds to start with many GPUs.
  explicit Nvml(std::string file = "libnvidia-ml.so.1", std::chrono::nanoseconds limit = std::chrono::seconds(10));
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// The state of the GPU at this PCI address ("0000:41:00.0"). CUDA and NVML number GPUs differently, but they agree
  /// about addresses. @throws what the poll hook of waits throws (Ctrl-C)
  [[nodiscard]] DeviceHealth read(const std::string& pci_bus_id);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with a thread that was left behind
};

inline constexpr std::uint64_t kUnknownMemory = ~std::uint64_t{0};  // NVML's value

/// The other processes on a GPU, out of a list of bytes by process number. In a container the list has the host's
/// numbers, and ours is unknown (`numbers_are_ours` false). Then one process is assumed to be this one, and the memory
/// of the others is unknown.
[[nodiscard]] OtherProcesses others_among(std::map<std::uint32_t, std::uint64_t> processes, std::uint32_t own_number,
                                          bool numbers_are_ours);

}  // namespace paceline::cuda
