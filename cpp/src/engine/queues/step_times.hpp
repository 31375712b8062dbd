// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

class SpaceCollectives;

/// The events before and after one claim on a device's stream.
struct Span {
  std::unique_ptr<Event> start;
  std::unique_ptr<Event> end;
  std::chrono::steady_clock::time_point opened;
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
  void classify(std::vector<char>& strict, const std::vector<char>& ran, const std::vector<char>& clean);

 private:
  std::mutex mutex_;
  std::vector<int> steps_without_;
};

/// The events of earlier steps of a group, for its next steps. If the driver allocates while NCCL's kernels are
/// launched, both can hang. So new events are made only until there are enough. Any thread.
class SpareEvents {
 public:
  /// An untimed event of the home device.
  [[nodiscard]] std::unique_ptr<Event> take_end(AsyncDevice& home);
  [[nodiscard]] Span take_span(DeviceId d, AsyncDevice& maker);
  /// `spans`: of each device, then of each space's arrival.
  void put(std::unique_ptr<Event> end, std::vector<std::vector<Span>> spans);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> ends_;
  std::vector<std::vector<Span>> spans_;
};

/// The times of one step. It may outlive the queues. Each device's worker records the runs of its device.
class RecordedTimes final : public StepTimes {
 public:
  /// `evidence` and `spare`: of all steps of the group. `home`, the device of space 0, makes the event that ends the
  /// step; `timeout` is for wait(). `hung`: whether a device of the group did not end its work in that time.
  RecordedTimes(std::shared_ptr<Evidence> evidence, std::shared_ptr<SpareEvents> spare,
                std::vector<std::size_t> space_of_device, AsyncDevice& home, std::chrono::nanoseconds timeout,
                std::shared_ptr<std::atomic<bool>> hung, std::weak_ptr<SpaceCollectives> collectives)
      : space_of_(std::move(space_of_device)),
        spans_(space_of_.size()),
        waits_(space_of_.size()),
        needs_all_(space_of_.size(), 1),
        over_(spare->take_end(home)),
        evidence_(std::move(evidence)),
        spare_(std::move(spare)),
        timeout_(timeout),
        hung_(std::move(hung)),
        collectives_(std::move(collectives)) {}
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
  void end_wait(DeviceId d, Stream& stream) { stream.record(*waits_[d].back().span.end); }
  /// The end of the run that is `back` runs before the device's last one; null if there were not that many.
  [[nodiscard]] const Event* end_of_run(DeviceId d, std::size_t back) const;
  /// Around the arrival of the parameters in a space, on the stream that brings them. Home's are there before.
  void begin_arrival(std::size_t space, AsyncDevice& maker, Stream& stream);
  void end_arrival(std::size_t space, Stream& stream);
  /// After the first bucket of parameters, if they come in buckets. Later ones change nothing.
  void note_first_arrival(std::size_t space, AsyncDevice& maker, Stream& stream);
  /// Whether the device begins when it has all parameters, or when it has the first bucket. On the device's worker.
  void enter(DeviceId d, bool needs_all) { needs_all_[d] = static_cast<char>(needs_all); }
  /// Everything of the step is on its way, and comes before the home stream's next work.
  void end(Stream& home) {
    home.record(*over_);
    ended_.store(true, std::memory_order_release);
  }

 private:
  [[nodiscard]] double arrival_seconds(DeviceId d) const;
  [[nodiscard]] double waited_seconds(DeviceId d, std::size_t run) const;

  struct Wait {
    std::size_t run = 0;  // of the device
    Span span;
  };

  std::vector<std::size_t> space_of_;     // of each device
  std::vector<std::vector<Span>> spans_;  // of each device
  std::vector<std::vector<Wait>> waits_;  // of each device, inside its runs
  std::vector<std::vector<Span>>
      arrivals_;                 // of each space: of all parameters, and one that ends with their first bucket
  std::vector<char> needs_all_;  // of each device
  std::unique_ptr<Event> over_;
  std::atomic<bool> ended_{false};  // until then the event is an earlier step's
  std::shared_ptr<Evidence> evidence_;
  std::shared_ptr<SpareEvents> spare_;
  std::chrono::nanoseconds timeout_;
  std::shared_ptr<std::atomic<bool>> hung_;
  std::weak_ptr<SpaceCollectives> collectives_;
  mutable std::vector<char> strict_;  // the answer of Evidence::classify(), under its lock; empty: not asked yet
};

}  // namespace paceline::internal
