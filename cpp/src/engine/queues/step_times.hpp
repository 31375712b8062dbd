// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

class SpaceCollectives;

/// A micro-batch on its way: recorded before and after it.
struct Span {
  std::unique_ptr<Event> start;
  std::unique_ptr<Event> end;
  std::chrono::steady_clock::time_point opened;
  double launch_seconds = 0.0;  ///< of the host
  bool overtaken = false;       ///< the device was at it before all of it was launched

  /// Whether the device may have waited for launches for a notable part of the time. It cannot have where it came to
  /// the run when all was launched; else for no longer than launching took, and where it then had as much work left,
  /// it was launching that was ahead.
  [[nodiscard]] bool held_up(double seconds) const { return overtaken && seconds < 2.0 * launch_seconds; }
};

/// How many steps ago each device was last measured without waiting for launches. A run that was held up says how long
/// launching takes, and not how fast the device is; but where all are (small models, or a caller who reads every loss),
/// it is the only evidence, and it is the time that such a step costs. So it is set aside only as long as there is
/// better. Any thread.
class Evidence {
 public:
  /// Of each device, whether what launching held up is to be set aside in this step. `used[d]`: how many runs it had;
  /// `clean[d]`: whether one of them is good evidence.
  [[nodiscard]] std::vector<char> classify(const std::vector<std::size_t>& used, const std::vector<char>& clean);

 private:
  std::mutex mutex_;
  std::vector<int> steps_without_;
};

/// What one step records, and what is known of it.
struct SpanLists {
  std::vector<std::vector<Span>> spans;  ///< of each device; events are made once
  std::vector<std::size_t> used;         ///< how many of them this step has
  std::unique_ptr<Event> over;
};

/// Keeps what steps no longer need for later ones. Any thread.
class SpanShelf {
 public:
  /// Null where it is empty.
  [[nodiscard]] std::unique_ptr<SpanLists> take();
  void put(std::unique_ptr<SpanLists> lists) noexcept;

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<SpanLists>> free_;
};

/// The times of one step. It may outlive the queues, as may what it shares with other steps. Each device's runs are
/// recorded by its own worker.
class RecordedTimes final : public StepTimes {
 public:
  /// What the steps of one group have in common.
  struct Shared {
    std::shared_ptr<SpanShelf> shelf = std::make_shared<SpanShelf>();
    std::shared_ptr<Evidence> evidence = std::make_shared<Evidence>();
  };

  /// `home` makes the event that ends the step; `timeout` is for wait().
  RecordedTimes(const Shared& shared, std::size_t device_count, AsyncDevice& home, std::chrono::nanoseconds timeout,
                std::weak_ptr<SpaceCollectives> collectives);
  ~RecordedTimes() override;

  [[nodiscard]] bool settled() const override { return lists_->over->done(); }
  void wait() const override;
  void stamp(std::vector<ClaimRecord>& claims) const override;

  /// True if the device had run dry: that time is not its own. `continues`: the run before goes on.
  bool begin_run(std::size_t d, AsyncDevice& maker, Stream& stream, bool continues);
  void restart_run(std::size_t d, Stream& stream);
  void end_run(std::size_t d, Stream& stream);
  /// The end of the run that is `back` runs before the device's last one; null where it had not so many.
  [[nodiscard]] const Event* end_of_run(std::size_t d, std::size_t back) const;
  /// Recorded when everything of the step is on its way.
  [[nodiscard]] Event& over() noexcept { return *lists_->over; }

 private:
  [[nodiscard]] Span& last(std::size_t d) { return lists_->spans[d][lists_->used[d] - 1]; }

  std::unique_ptr<SpanLists> lists_;
  Shared shared_;
  std::chrono::nanoseconds timeout_;
  std::weak_ptr<SpaceCollectives> collectives_;
  mutable std::mutex mutex_;
  mutable std::vector<char> strict_;  // what Evidence::classify() said; empty: not asked yet
};

}  // namespace paceline::internal
