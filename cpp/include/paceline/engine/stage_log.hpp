// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/pipeline_step.hpp>
#include <paceline/export.hpp>
#include <paceline/observe/event_ring.hpp>
#include <paceline/observe/history.hpp>
#include <paceline/observe/metrics.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

/// One stage of a step that ran.
struct StageRun {
  DeviceId device{};
  std::int64_t blocks = 0;
  std::int64_t items = 0;
};

/// What is kept of a pipeline's steps: figures, events and history, as StepLoop has them. A step lasts from its first
/// action to its last. Reading is thread-safe.
class PACELINE_API StageLog {
 public:
  explicit StageLog(const DeviceGroup& group);

  /// Takes note of a step that was committed. `bounds`: the items [begin, end) of each micro-batch. `started`: when the
  /// actions' clock began. `moved`: whether cuts or devices are others than those of the step before.
  void add(std::span<const StageRun> stages, std::span<const std::pair<std::int64_t, std::int64_t>> bounds,
           std::span<const std::vector<ActionRecord>> actions, std::chrono::steady_clock::time_point started,
           bool moved);
  void add(const plan::StagePlan& plan, std::size_t block_count, std::span<const std::vector<ActionRecord>> actions,
           std::chrono::steady_clock::time_point started, bool moved);

  /// DeviceGroup::ids(), the order of the figures.
  [[nodiscard]] const std::vector<DeviceId>& devices() const noexcept { return devices_; }
  [[nodiscard]] observe::Metrics metrics() const { return metrics_.snapshot(); }
  [[nodiscard]] const observe::EventRing& events() const noexcept { return events_; }
  [[nodiscard]] const observe::History& history() const noexcept { return history_; }

 private:
  std::vector<DeviceId> devices_;
  std::int64_t steps_ = 0;
  std::chrono::steady_clock::time_point origin_;
  observe::MetricsRecorder metrics_;
  observe::History history_;
  observe::EventRing events_;
};

}  // namespace paceline
