// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <paceline/runtime/device.hpp>
#include <paceline/runtime/work_source.hpp>

#include "runtime/short_wait.hpp"

namespace paceline::internal {

/// Where the caller of a source sleeps. Shared by the source and the group, so that a late worker can still use it.
class TaskSignal {
 public:
  void wake() noexcept;
  /// Sleeps until `done()` or until the time is over. Returns the value of done().
  template <class Done>
  bool wait_for(std::chrono::nanoseconds timeout, Done done) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, done);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// The worker of one device: its thread and the ways to reach it. The group and the thread own it jointly, so that it
/// outlives the group if the thread is left behind.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  struct Open {
    std::shared_ptr<WorkSource> source;
    int priority = 0;
    const Event* awaited = nullptr;  // what it waits for, if that is an event
  };

  /// `own_cores`: no other worker of the group uses its cores.
  Worker(Device device, std::size_t index, bool own_cores);

  /// @throws std::system_error if the thread cannot be started.
  void start();
  /// Adds a source to ask: by priority, and the older one first at equal priority. It comes in a list, because a list's
  /// element can move to another list without memory, so nothing fails here or on the thread. `callers_core` is the
  /// core that the caller runs on.
  void open(std::list<Open> source, int callers_core) noexcept;
  /// Makes the worker ask its sources again, if it sleeps.
  void wake() noexcept;
  /// Accepts no further source. The thread ends when it has let go of all open sources.
  void stop() noexcept;

  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] bool ready() const noexcept { return ready_.load(); }
  [[nodiscard]] bool exited() const noexcept { return exited_.load(); }
  [[nodiscard]] std::thread& thread() noexcept { return thread_; }

 private:
  using Clock = WorkSource::Clock;
  /// Whether what a source waits for is there.
  [[nodiscard]] bool due() const noexcept;

  /// Makes a change that the thread looks at, and wakes it.
  template <class Change>
  void call(Change change);
  void work();
  /// Asks the sources once, from the highest priority. True if it ran something.
  bool ask();
  void perform(WorkSource& source, std::int64_t number);
  [[nodiscard]] bool take_arrivals();
  void sleep(std::uint64_t seen);
  [[nodiscard]] bool called_since(std::uint64_t seen) const noexcept {
    return calls_.load(std::memory_order_acquire) != seen;
  }

  Device device_;
  std::size_t index_;
  bool own_cores_;
  std::thread thread_;
  std::atomic<bool> ready_{false};
  std::atomic<bool> exited_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Open> arrived_;  // guarded by the mutex
  bool stopped_ = false;     // guarded by the mutex
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<int> callers_core_{-1};

  // Used by the thread alone.
  std::list<Open> open_;  // by priority
  bool awaits_events_ = false;
  Clock::time_point until_ = Clock::time_point::max();
  ShortWait idle_wait_;
};

}  // namespace paceline::internal
