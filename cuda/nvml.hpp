// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <paceline/runtime/device_health.hpp>

namespace paceline::cuda {

/// NVIDIA's management library, which tells how a GPU is. Never linked: it is opened at the first question, and stays
/// open. A copy that is in the process already (PyTorch's, NCCL's) is taken.
///
/// NVML's calls have no deadline, and a driver that hangs, as when a GPU fell off the bus, keeps them for ever. So each
/// question runs on a thread of its own. A thread that does not come back in time is left behind, and nothing else is
/// asked until it is back: there is at most one such thread. Any thread may ask; questions run one after the other.
class Nvml {
 public:
  /// The process's own.
  [[nodiscard]] static Nvml& of_process();

  /// @param limit Without persistence mode NVML takes seconds to start on a machine with many GPUs.
  explicit Nvml(std::string file = "libnvidia-ml.so.1", std::chrono::nanoseconds limit = std::chrono::seconds(10));
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// How the GPU at this PCI address ("0000:41:00.0") is now. CUDA's and NVML's numbers of a GPU differ.
  /// @throws what the poll hook of waits does (Ctrl-C)
  [[nodiscard]] DeviceHealth read(const std::string& pci_bus_id);

 private:
  struct State;
  std::shared_ptr<State> state_;  // a thread that was left behind still finds it
};

inline constexpr std::uint64_t kUnknownMemory = ~std::uint64_t{0};  // as NVML says it

/// Which of the processes on a GPU, with their bytes by process number, are not this one. In a container the numbers
/// are those of the host, where ours is not known (`numbers_are_ours` false): then one process is taken to be us, and
/// the memory of the rest is unknown.
[[nodiscard]] OtherProcesses others_among(std::map<std::uint32_t, std::uint64_t> processes, std::uint32_t own_number,
                                          bool numbers_are_ours);

}  // namespace paceline::cuda
