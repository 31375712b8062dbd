// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/async_device.hpp>

#include "engine/hang.hpp"

namespace paceline::internal {

class SpaceCollectives;

/// The events before and after one claim on a device's stream.
struct Span {
  const AsyncDevice* maker = nullptr;  ///< of both events
  std::unique_ptr<Event> start;
  std::unique_ptr<Event> end;
  std::chrono::steady_clock::time_point opened{};
  double launch_seconds = 0.0;  ///< the host's time for launching it
  bool overtaken = false;       ///< the device began with it before all of it was launched

  /// Whether the device may have spent a notable part of the time waiting for launches. It has not if everything was
  /// launched when it began. Otherwise it has waited no longer than the launching took; if its time is twice that, the
  /// launching was ahead of it.
  [[nodiscard]] bool held_up(double seconds) const { return overtaken && seconds < 2.0 * launch_seconds; }
};

/// Decides whether times of runs that waited for launches count. Such a time says how long launching takes, not how
/// fast the device is. It is still the only evidence where every run waits (small models, or a caller who reads every
/// loss), and it is what such a step costs. So it is set aside only while there is recent better evidence. Any thread.
class Evidence {
 public:
  /// `strict[d]`: whether to set aside the device's runs of this step that waited for launches. A step is judged once,
  /// however often it is asked for its times: a list that is not empty stays as it is. `ran[d]`: whether the device had
  /// runs; `clean[d]`: whether one of them is good evidence.
  void classify(PerDevice<char>& strict, const PerDevice<char>& ran, const PerDevice<char>& clean);

 private:
  std::mutex mutex_;
  PerDevice<int> steps_without_;
};

/// The events of earlier steps of a group, for its next steps. If the driver allocates while NCCL's kernels are
/// launched, both can hang. So new events are made only until there are enough. Any thread.
class SpareEvents {
 public:
  /// An untimed event of the home device.
  [[nodiscard]] std::unique_ptr<Event> take_end(AsyncDevice& home);
  [[nodiscard]] Span take_span(AsyncDevice& maker);
  void put(std::unique_ptr<Event> end, std::span<std::vector<Span>* const> spans);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> ends_;
  std::map<const AsyncDevice*, std::vector<Span>> spans_;  // by their maker
};

/// The times of one step. It may outlive the queues. Each device's worker records the runs of its device.
class RecordedTimes final : public StepTimes {
 public:
  /// `evidence` and `spare`: of all steps of the group. `home`, the device of space 0, makes the event that ends the
  /// step; `timeout` is for wait(). `hung`: of the group.
  RecordedTimes(std::shared_ptr<Evidence> evidence, std::shared_ptr<SpareEvents> spare,
                const PerDevice<std::size_t>& space_of_device, AsyncDevice& home, std::chrono::nanoseconds timeout,
                Hang hung, std::weak_ptr<SpaceCollectives> collectives)
      : over_(spare->take_end(home)),
        evidence_(std::move(evidence)),
        spare_(std::move(spare)),
        timeout_(timeout),
        hung_(std::move(hung)),
        collectives_(std::move(collectives)) {
    for (const auto& [id, space] : space_of_device) devices_.add(id, {.space = space});
  }
  ~RecordedTimes() override;
  RecordedTimes(const RecordedTimes&) = delete;
  RecordedTimes& operator=(const RecordedTimes&) = delete;

  [[nodiscard]] bool settled() const override { return ended_.load(std::memory_order_acquire) && over_->done(); }
  void wait() const override;
  void stamp(std::vector<ClaimRecord>& claims) const override;

  /// Returns true if the device had run out of work: its time then includes a wait for the host. `continues`: this is
  /// another piece of the last run.
  bool begin_run(DeviceId d, AsyncDevice& maker, Stream& stream, bool continues);
  void restart_run(DeviceId d, Stream& stream);
  void end_run(DeviceId d, Stream& stream);
  /// Around what the device waits for inside a run, on its stream. It does not count as the run's time, but as arrival.
  void begin_wait(DeviceId d, AsyncDevice& maker, Stream& stream);
  void end_wait(DeviceId d, Stream& stream) { stream.record(*devices_[d].waits.back().span.end); }
  /// The end of the run that is `back` runs before the device's last one; null if there were not that many.
  [[nodiscard]] const Event* end_of_run(DeviceId d, std::size_t back) const;
  /// Around the arrival of the parameters in a space, on the stream that brings them. Home's are there before.
  void begin_arrival(std::size_t space, AsyncDevice& maker, Stream& stream);
  void end_arrival(std::size_t space, Stream& stream);
  /// After the first bucket of parameters, if they come in buckets. Later ones change nothing.
  void note_first_arrival(std::size_t space, AsyncDevice& maker, Stream& stream);
  /// Whether the device begins when it has all parameters, or when it has the first bucket. On the device's worker.
  void enter(DeviceId d, bool needs_all) { devices_[d].needs_all = needs_all; }
  /// Everything of the step is on its way, and comes before the home stream's next work.
  void end(Stream& home) {
    home.record(*over_);
    ended_.store(true, std::memory_order_release);
  }

 private:
  struct Wait {
    std::size_t run = 0;  // of the device
    Span span;
  };

  struct DeviceTimes {
    std::size_t space = 0;
    std::vector<Span> spans{};  // of its runs
    std::vector<Wait> waits{};  // inside its runs
    bool needs_all = true;
  };

  [[nodiscard]] double arrival_seconds(const DeviceTimes& device) const;
  [[nodiscard]] static double waited_seconds(const DeviceTimes& device, std::size_t run);

  PerDevice<DeviceTimes> devices_;
  // Of each space: of all parameters, and one that ends with their first bucket.
  std::vector<std::vector<Span>> arrivals_;
  std::unique_ptr<Event> over_;
  std::atomic<bool> ended_{false};  // until then the event is an earlier step's
  std::shared_ptr<Evidence> evidence_;
  std::shared_ptr<SpareEvents> spare_;
  std::chrono::nanoseconds timeout_;
  Hang hung_;
  std::weak_ptr<SpaceCollectives> collectives_;
  mutable PerDevice<char> strict_;  // the answer of Evidence::classify(), under its lock; empty: not asked yet
};

}  // namespace paceline::internal
