// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/turn.hpp>

namespace paceline {

namespace internal {
class TaskSignal;
class GroupWorkers;
class Worker;
class WorkerRegistry;
}  // namespace internal

/// A source's answer to a device that asks for work.
struct NextWork {
  enum class Kind : std::uint8_t {
    take,  ///< run this work
    wait,  ///< nothing now: ask again when `event` is done, at `until`, or after WorkSource::wake()
    done,  ///< nothing ever again: the device stops asking
  };
  using TimePoint = std::chrono::steady_clock::time_point;

  Kind kind = Kind::done;
  std::int64_t work = 0;         ///< for take: the source's own number of the work
  const Event* event = nullptr;  ///< for wait: must live until the device asks again
  TimePoint until = TimePoint::max();

  [[nodiscard]] static NextWork take(std::int64_t work) { return {.kind = Kind::take, .work = work}; }
  [[nodiscard]] static NextWork wait(const Event* event = nullptr, TimePoint until = TimePoint::max()) {
    return {.kind = Kind::wait, .event = event, .until = until};
  }
  [[nodiscard]] static NextWork done() { return {}; }
};

/// When a piece of work ran, by the clock of the worker's thread.
struct WorkTiming {
  std::chrono::steady_clock::time_point start;
  std::chrono::steady_clock::time_point finish;
};

/// Where the workers of a group get their work: a step, a queue of jobs, the action lists of a pipeline.
///
/// A worker repeats one loop. It asks its open sources for the next work on its device, in order of priority, and those
/// of equal priority in turn. It runs the work, tells the source how long that took, and asks again from the highest
/// priority. So a source of low priority fills the gaps of those above it, and gives way after each piece of its
/// work. A worker skips a source that answers wait. If all sources wait, the worker sleeps until an event is done, a
/// deadline has come, or somebody calls wake(). Of the sources that are gangs (OpenOptions) it asks one, until that one
/// is done, and then the next.
///
/// The contract, for each device:
///   next() -> take(k), then perform(k), then done(k) or, if perform() threw, failed(k); then next() again
///   next() -> wait, then next() again, perhaps for no reason
///   next() -> done: the worker lets go of the source
///
/// Threads: the device's worker calls these functions; workers of different devices call them at the same time. Any
/// thread may call the constructor, cancel() and complete(). A source is opened once (DeviceGroup::open()) and lives
/// until every worker has let go of it. A late worker still asks, so a complete source must answer. Sources are
/// independent of each other, and workers do not interpret the work.
class PACELINE_API WorkSource {
 public:
  using Clock = std::chrono::steady_clock;

  WorkSource();
  virtual ~WorkSource();
  WorkSource(const WorkSource&) = delete;
  WorkSource& operator=(const WorkSource&) = delete;

  /// Must neither block nor throw. The source reports its own failures.
  [[nodiscard]] virtual NextWork next(DeviceId device, Clock::time_point now) noexcept = 0;
  /// Runs a piece of work on the device whose `turn` this thread has. May throw.
  virtual void perform(DeviceId device, std::int64_t work, Turn& turn) = 0;
  virtual void done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept = 0;
  virtual void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept = 0;
  /// Lets running work finish and starts nothing new; next() soon answers done. Any thread.
  virtual void cancel(std::exception_ptr reason) noexcept = 0;
  /// Whether the caller who waits for this source may go on. Turns true once and stays true. Any thread.
  [[nodiscard]] virtual bool complete() const noexcept = 0;

 protected:
  /// Makes the device's worker ask again, if it waits. Any thread.
  void wake(DeviceId device) noexcept;
  /// Like wake(), for all devices.
  void wake_all() noexcept;
  /// Makes the waiting caller check complete() again. Any thread.
  void wake_caller() noexcept;

 private:
  /// Called once, when the source is opened, before any device asks. `devices`: whose workers will ask. Must call
  /// neither wake() nor the group. If it throws, the source is not opened.
  virtual void opened(std::span<const DeviceId> devices);
  /// The part of a device's time, from 0 to 1, that a source which is no gang takes from gangs at most, in the long
  /// run: plans of steps count no more. 0: its work is not counted. For the worker that asks.
  [[nodiscard]] virtual double part() const noexcept { return 0.0; }

  friend class DeviceGroup;
  friend class internal::GroupWorkers;
  friend class internal::Worker;
  friend class internal::WorkerRegistry;
  using Workers = std::vector<std::pair<DeviceId, std::weak_ptr<internal::Worker>>>;

  void attach(Workers workers, std::span<const DeviceId> devices);
  /// Another worker asks for the device from now on.
  void replace(DeviceId device, const std::shared_ptr<internal::Worker>& worker) noexcept;

  enum class Progress : std::uint8_t { waiting, begun, withdrawn, over };
  /// A worker's turn has come. False if the source was withdrawn before.
  [[nodiscard]] bool begin() noexcept;
  /// If no worker has begun it, it is cancelled and none ever will. Who waits for it is told, also if cancel() does
  /// nothing.
  void withdraw(std::exception_ptr reason) noexcept;
  /// Whether nobody waits for it any more.
  [[nodiscard]] bool over() const noexcept { return progress_ == Progress::over || complete(); }

  std::atomic<Progress> progress_{Progress::waiting};
  std::shared_ptr<internal::TaskSignal> signal_;
  std::mutex mutex_;  // cancel() may run while the source is being opened
  Workers workers_;   // empty before the source is opened
};

}  // namespace paceline
