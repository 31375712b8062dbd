// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/async.hpp>
#include <paceline/runtime/turn.hpp>

namespace paceline {

namespace detail {
class TaskSignal;
class Worker;
}  // namespace detail

/// What a source has for a device that asks.
struct NextWork {
  enum class Kind : std::uint8_t {
    take,  ///< run this work
    wait,  ///< nothing yet: ask again when `event` is done, at `until`, or after WorkSource::wake()
    done,  ///< nothing any more: the device does not ask again
  };
  using TimePoint = std::chrono::steady_clock::time_point;

  Kind kind = Kind::done;
  std::int64_t work = 0;         ///< of take: the source's own number for it
  const Event* event = nullptr;  ///< of wait; it must live until the device asks again
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

/// Where the workers of a group get their work from: a step, a queue of jobs, the action lists of a pipeline.
///
/// A worker does one thing: it asks its open sources, the one of highest priority first, what is next for its device;
/// runs that; tells the source how long it took; and asks again from the top. So a source of low priority fills the
/// gaps of those above it, and gives way between two pieces of its work. A source that says wait is passed over. A
/// worker whose sources all wait sleeps until an event is done, the earliest deadline has come, or somebody calls
/// wake().
///
/// The contract, of each device:
///   next() -> take(k), then perform(k), then done(k) or, if perform() threw, failed(k); then next() again
///   next() -> wait, then next() again, perhaps for no reason
///   next() -> done: the worker lets go of the source
///
/// Threads: all of these are called on the device's worker, for different devices at once. cancel(), complete() and the
/// constructor's caller may be on any thread. A source is opened once (DeviceGroup::open()), and lives until every
/// worker has let go of it; a worker that is late still asks, so a source that is complete must answer. Sources know
/// nothing of each other, and workers nothing of what work is.
class PACELINE_API WorkSource {
 public:
  using Clock = std::chrono::steady_clock;

  WorkSource();
  virtual ~WorkSource();
  WorkSource(const WorkSource&) = delete;
  WorkSource& operator=(const WorkSource&) = delete;

  /// Must not block, nor throw: what goes wrong here is the source's own to tell.
  [[nodiscard]] virtual NextWork next(std::size_t device, Clock::time_point now) noexcept = 0;
  /// Runs a piece of work on the device whose `turn` this thread has. May throw.
  virtual void perform(std::size_t device, std::int64_t work, Turn& turn) = 0;
  virtual void done(std::size_t device, std::int64_t work, const WorkTiming& timing) noexcept = 0;
  virtual void failed(std::size_t device, std::int64_t work, std::exception_ptr error) noexcept = 0;
  /// Nothing further shall begin; what runs comes to its end, and next() soon says done. Any thread.
  virtual void cancel(std::exception_ptr reason) noexcept = 0;
  /// Whether the caller who waits for this source may go on. Turns true once. Any thread.
  [[nodiscard]] virtual bool complete() const noexcept = 0;

 protected:
  /// Makes the device's worker ask again, if it waits. Any thread.
  void wake(std::size_t device) noexcept;
  /// The same of every device.
  void wake_all() noexcept;
  /// Makes the waiting caller look at complete() again. Any thread.
  void wake_caller() noexcept;

 private:
  /// Once, when it is opened on a group of so many devices, before any of them asks.
  virtual void opened(std::size_t device_count);

  friend class DeviceGroup;
  friend class GroupWorkers;

  void attach(std::vector<std::weak_ptr<detail::Worker>> workers);

  std::shared_ptr<detail::TaskSignal> signal_;
  std::mutex mutex_;                                    // somebody may cancel while it is being opened
  std::vector<std::weak_ptr<detail::Worker>> workers_;  // of every device; none before it is opened
};

}  // namespace paceline
