// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cfenv>
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

/// What Turn::of_this_thread() returns.
[[nodiscard]] const Device*& device_of_this_thread() noexcept;
/// For a source that a worker asks: whether the worker takes part in a gang, such as a step, that is not complete, and
/// whether that gang waited when it was last asked.
enum class BesideGang { none, works, waits };
[[nodiscard]] BesideGang& beside_gang_of_this_thread() noexcept;
/// What a worker has done while a gang had work for it.
struct LentTime {
  double seconds = 0.0;  ///< since the thread began
  double most = 0.0;     ///< the part of its time that its sources may take in the long run (WorkSource::part())
};
[[nodiscard]] LentTime& lent_time_of_this_thread() noexcept;

/// The worker of one device: its thread and the ways to reach it. There is one for each device in the process, and
/// groups share it (WorkerRegistry). Groups and the thread own it jointly, so that it outlives them if the thread is
/// left behind.
class Worker : public std::enable_shared_from_this<Worker> {
 public:
  struct Open {
    std::shared_ptr<WorkSource> source;
    std::uint64_t group = 0;  // the number of the group that has opened it
    DeviceId device{};        // what the source calls the worker's device
    int priority = 0;
    bool gang = false;
    std::fenv_t rounding{};          // of the thread that has opened it
    const Event* awaited = nullptr;  // what it waits for, if that is an event
  };

  explicit Worker(Device device);

  /// @throws std::system_error if the thread cannot be started.
  void start();
  /// Adds sources to ask. Those that are gangs are asked one after the other, in the order in which they come here. The
  /// others are asked beside them by priority, and in turn at equal priority. They come in a list, because an element
  /// can move to another list without memory, so nothing fails here or on the thread. `callers_core` is the core that
  /// the caller runs on.
  void open(std::list<Open> sources, int callers_core) noexcept;
  /// Whether it has begun a source of that group and not let go of it.
  [[nodiscard]] bool inside(std::uint64_t group) noexcept;
  /// Whether the worker has still something to do for that group: a source that it has begun, or one whose turn has not
  /// come and that somebody waits for.
  [[nodiscard]] bool needed_by(std::uint64_t group) noexcept;
  /// Leaves the worker in the piece of work of that source which it is in: it asks nobody afterwards. `begun`: copies
  /// of what it has begun, for who takes its place. False if it is in no piece of this source.
  [[nodiscard]] bool hand_over(const WorkSource& source, std::list<Open>& begun);
  /// Takes back the sources that it has not begun.
  [[nodiscard]] std::list<Open> take_waiting() noexcept;
  /// Whether no other worker uses its cores.
  void set_own_cores(bool own) noexcept { own_cores_.store(own, std::memory_order_relaxed); }
  /// Makes the worker ask its sources again, if it sleeps.
  void wake() noexcept;
  /// Accepts no further source. The thread ends when it has let go of all that it was given.
  void stop() noexcept;

  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] bool ready() const noexcept { return ready_.load(); }
  [[nodiscard]] bool exited() const noexcept { return exited_.load(); }
  [[nodiscard]] bool left_behind() const noexcept { return left_behind_.load(); }
  /// For who holds the registry's lock: what took its place when it was left behind, or null.
  [[nodiscard]] const std::shared_ptr<Worker>& successor() const noexcept { return successor_; }
  [[nodiscard]] std::thread& thread() noexcept { return thread_; }
  [[nodiscard]] bool is_this_thread() const noexcept { return std::this_thread::get_id() == id_; }

 private:
  using Clock = WorkSource::Clock;
  /// Whether what a source waits for is there.
  [[nodiscard]] bool due() const noexcept;

  /// Makes a change that the thread looks at, and wakes it.
  template <class Change>
  void call(Change change);
  void work();
  /// Asks the sources once, from the highest priority. False if all of them wait.
  bool ask();
  /// False if it was handed over meanwhile.
  [[nodiscard]] bool perform(const Open& open, std::int64_t number);
  /// Other work than a gang's ran since then.
  void count_lent(Clock::time_point start) noexcept;
  void give_turn(std::list<Open>::iterator one);
  [[nodiscard]] std::list<Open>::iterator let_go(std::list<Open>::iterator one);
  /// True if it was stopped and nothing is left to come.
  [[nodiscard]] bool take_arrivals();
  void sleep(std::uint64_t seen);
  [[nodiscard]] bool called_since(std::uint64_t seen) const noexcept {
    return calls_.load(std::memory_order_acquire) != seen;
  }

  [[nodiscard]] bool handed_over() const noexcept { return inside_.load() == this; }

  Device device_;
  std::thread thread_;
  std::thread::id id_;  // also after it was detached
  std::atomic<bool> own_cores_{false};
  // Written under the registry's lock.
  friend class WorkerRegistry;
  std::atomic<bool> left_behind_{false};
  std::shared_ptr<Worker> successor_;  // has its place, and what it had not begun
  std::atomic<bool> ready_{false};
  std::atomic<bool> exited_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Open> arrived_;  // guarded by the mutex; a gang stays here until its turn
  bool stopped_ = false;     // guarded by the mutex
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<const void*> inside_{nullptr};  // the source whose work it performs; itself once it was handed over
  std::atomic<int> callers_core_{-1};

  // Used by the thread alone.
  std::list<Open> open_;    // by priority; one gang at most; changed under the mutex, for those who ask inside()
  std::uint64_t last_ = 0;  // the group whose claim it ran last
  bool awaits_events_ = false;
  Clock::time_point until_ = Clock::time_point::max();
  ShortWait idle_wait_;
};

}  // namespace paceline::internal
