// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <paceline/runtime/device.hpp>
#include <paceline/runtime/group_task.hpp>

#include "runtime/short_wait.hpp"

namespace paceline {

namespace detail {

/// Where the caller of a task sleeps. Shared by the task and the group, so that a late worker may still knock.
class TaskSignal {
 public:
  void wake() noexcept;
  /// Sleeps until `done()` or the time is over; the value of done().
  template <class Done>
  bool wait_for(std::chrono::nanoseconds timeout, Done done) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, done);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// One worker's mailbox. Owned jointly by the group and the thread: a thread that is left behind still finds it.
class Mailbox {
 public:
  /// Of a caller that runs on this core.
  void post(std::shared_ptr<GroupTask> task, int callers_core);
  /// No further task comes; one that lies here is still taken.
  void stop();
  /// The next task; null when there is none any more. `own_core`: no other worker needs the core this thread runs on.
  [[nodiscard]] std::shared_ptr<GroupTask> take(bool own_core);

  std::atomic<bool> ready{false};
  std::atomic<bool> exited{false};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<GroupTask> task_;
  bool stopped_ = false;
  std::atomic<bool> full_{false};  // there is a task, or stopped_; for looking without the lock
  std::atomic<int> callers_core_{-1};
  ShortWait wait_;
};

}  // namespace detail

/// The workers behind the handles of one group.
class GroupWorkers {
 public:
  explicit GroupWorkers(std::vector<Device> devices);
  ~GroupWorkers();
  GroupWorkers(const GroupWorkers&) = delete;
  GroupWorkers& operator=(const GroupWorkers&) = delete;

  [[nodiscard]] const std::vector<Device>& devices() const noexcept { return devices_; }
  void submit(const std::shared_ptr<GroupTask>& task);
  [[nodiscard]] bool busy() const noexcept;
  /// As DeviceGroup::wait(), but once: `sleep` is asked if it is not soon done.
  template <class Done, class Sleep>
  bool await(Done done, Sleep sleep) {
    return callers_wait_.until(!on_a_workers_core(), done, sleep);
  }
  void close(std::chrono::nanoseconds timeout, const std::function<bool()>& between = {});
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }

  /// Waits until every worker that some close() left behind has come to its end, at most until the time is over.
  static void await_left_behind(std::chrono::nanoseconds timeout);

 private:
  struct Threads;  // everything a forked child must not touch

  void await_ready();
  [[nodiscard]] bool on_a_workers_core() const noexcept;
  void require_alive(const char* call) const;
  [[nodiscard]] bool forked() const noexcept;

  std::vector<Device> devices_;
  pid_t owner_;
  std::atomic<bool> closed_{false};
  detail::ShortWait callers_wait_;
  Threads* threads_;  // leaked on purpose in a forked child
};

}  // namespace paceline
