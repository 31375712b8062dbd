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
///
/// A wait hears the poll hook of waits (Ctrl-C) only where its job touches nothing but what it owns, as connecting and
/// ending do: the job runs on after the caller has left. One that enqueues work on the caller's buffers, or hands
/// memory to the caller, is waited for until it is back or given up: the caller would take back what it still uses.
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

  enum class Interrupt { no, yes };

  /// Waits until the thread has run `job`, and rethrows what it threw. False: it is not back within `timeout`, and is
  /// given up. What an interrupted call has left running comes first, and has what is left of its own time for that.
  /// Requires: !given_up().
  /// @throws with Interrupt::yes what the poll hook of waits does: then the job may still run, and the next one waits
  [[nodiscard]] bool run(Job job, std::chrono::nanoseconds timeout, Interrupt interrupt = Interrupt::no);
  [[nodiscard]] bool given_up() const noexcept;
  /// Ends the thread. False: it does not come back within `timeout`, and is given up.
  [[nodiscard]] bool close(std::chrono::nanoseconds timeout);
  /// For who was interrupted and does not come back: the thread runs `last` when it is back from what it is at, and
  /// ends. Nobody waits for that.
  void leave(Job last) noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace paceline::nccl
