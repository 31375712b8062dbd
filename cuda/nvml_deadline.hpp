// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace paceline::cuda {

/// Gives NVML's calls the deadline that they lack: a driver that hangs, as when a GPU fell off the bus, keeps them for
/// ever. Each job runs on a thread of its own, which is given up if it does not come back: not joined, and what the job
/// refers to it must own. While one is away nothing else is asked, so that threads do not pile up. Any thread.
class NvmlDeadline {
 public:
  /// The process's own: 10 s. Without persistence mode NVML takes seconds to start on a box with many GPUs.
  [[nodiscard]] static NvmlDeadline& of_process();

  explicit NvmlDeadline(std::chrono::nanoseconds limit);
  NvmlDeadline(const NvmlDeadline&) = delete;
  NvmlDeadline& operator=(const NvmlDeadline&) = delete;

  void set_limit(std::chrono::nanoseconds limit);
  [[nodiscard]] std::chrono::nanoseconds limit() const;

  /// Whether `job`, which must not throw, was run to its end. It is not run while an earlier one is still away, or
  /// where no thread can be had.
  /// @throws what the poll hook of waits does (Ctrl-C): the job is given up as one that takes too long is
  [[nodiscard]] bool run(std::function<void()> job);

 private:
  struct State;
  std::shared_ptr<State> state_;  // of the threads too
};

}  // namespace paceline::cuda
