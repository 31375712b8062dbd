// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace paceline::internal {

/// One thread that runs jobs in order, and in between looks after the work that they started.
///
/// NCCL wants all calls for one set of communicators from one thread at a time, in one order. Sums of many GPUs would
/// hold up whoever asks for them. A call of either may never return. Then the thread is given up: nobody joins it, so
/// its jobs must own everything that they use. One caller at a time, except for start() and wait(). After fork() the
/// child has no such thread: there wait() and close() return at once, and nothing else may be called.
///
/// The poll hook of waits (Ctrl-C) can only end a wait for a job that uses nothing but its own data, such as connecting
/// and closing: the job continues after the caller has left. A job that enqueues work on the caller's buffers is
/// waited for until it returns or is given up, or it is told before to enqueue nothing more. Otherwise the caller might
/// free what the job uses.
class IssuingThread {
 public:
  using Job = std::function<void()>;
  /// The thread calls it first, and keeps what it returns until its end: the device that is current, for example. If it
  /// throws an Error, the thread does without, because its first job meets the same error and can report it.
  using Enter = std::function<std::shared_ptr<void>()>;
  /// Called every `interval` while it returns true; again after each job.
  using LookAfter = std::function<bool()>;

  /// @throws Unavailable if the system gives no thread
  explicit IssuingThread(const std::string& name, Enter enter = {}, LookAfter look_after = {},
                         std::chrono::nanoseconds interval = {});
  /// Gives the thread up if it has not ended yet.
  ~IssuingThread();
  IssuingThread(const IssuingThread&) = delete;
  IssuingThread& operator=(const IssuingThread&) = delete;

  enum class Interrupt { no, yes };

  /// Waits until the thread has run `job`, and rethrows its exception. False: the thread did not return within
  /// `timeout`, and is given up. A job that an interrupted call has left runs first, for at most the rest of its own
  /// timeout. Requires: !given_up().
  /// @throws with Interrupt::yes, what the poll hook of waits throws; then the job may still run, and the next one
  /// waits
  [[nodiscard]] bool run(Job job, std::chrono::nanoseconds timeout, Interrupt interrupt = Interrupt::no);
  /// Gives the thread a job, and does not wait. The job does not throw. Requires: every job before it has begun. Any
  /// thread. After given_up() the job is dropped.
  void start(Job job);
  /// Waits until the thread has run all jobs. False: it did not within `timeout`, now or before, and is given up.
  /// @throws with Interrupt::yes, what the poll hook of waits throws; then a job may still run
  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout, Interrupt interrupt = Interrupt::no);
  [[nodiscard]] bool given_up() const noexcept;
  /// Ends the thread after its jobs. False: it did not return within `timeout`, and is given up.
  [[nodiscard]] bool close(std::chrono::nanoseconds timeout);
  /// For a caller that was interrupted and will not call again. The thread finishes its job, runs `last` and ends.
  /// Nobody waits for it.
  void leave(Job last) noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace paceline::internal
