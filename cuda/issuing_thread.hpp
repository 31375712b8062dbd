// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace paceline::nccl {

/// One thread that does what it is given, in order, and in between looks after what it has begun.
///
/// NCCL wants all its calls for one set of communicators from one thread at a time, in one order; and a call may never
/// come back. A thread that does not is given up: it is not joined, and what its jobs refer to they must own.
/// Callers: one at a time; none after fork(), whose child has no such thread.
class IssuingThread {
 public:
  using Job = std::function<void()>;
  /// Called every `interval` while it returns true; again after each job.
  using LookAfter = std::function<bool()>;

  /// @param device the GPU that is current to the thread: one that it works for.
  IssuingThread(const std::string& name, int device, LookAfter look_after, std::chrono::nanoseconds interval);
  /// Gives the thread up if it has not ended yet.
  ~IssuingThread();
  IssuingThread(const IssuingThread&) = delete;
  IssuingThread& operator=(const IssuingThread&) = delete;

  /// Waits until the thread has run `job`, and rethrows what it threw. False: it is not back within `timeout`, and is
  /// given up. Requires: !given_up().
  [[nodiscard]] bool run(Job job, std::chrono::nanoseconds timeout);
  [[nodiscard]] bool given_up() const noexcept;
  /// Ends the thread. False: it does not come back within `timeout`, and is given up.
  [[nodiscard]] bool close(std::chrono::nanoseconds timeout);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace paceline::nccl
