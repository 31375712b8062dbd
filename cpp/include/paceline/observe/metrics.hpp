// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::observe {

/// The measurements of one successful step. Vectors have one entry per device, in the order of the group.
struct StepSample {
  std::vector<std::int64_t> items{};
  std::vector<double> busy_seconds{};  ///< computing, by the device's own clock
  double compute_seconds = 0.0;        ///< the makespan: from the first start to the last finish
  double step_seconds = 0.0;           ///< with the reduction
  bool moved = false;                  ///< its shares differ from those of the step before
  std::vector<double> costs{};         ///< of the items, in the caller's unit; empty for a step without costs
  std::vector<std::int64_t>
      planned{};  ///< the shares that were planned, which devices may take from each other; empty for a step with costs
  std::vector<std::int64_t> blocks{};         ///< of the stages of a pipeline; else empty
  std::optional<double> reduction_seconds{};  ///< of step_seconds; not of pipelines, nor where a GPU takes part
  /// What was lost because devices began late: their mean, weighted by their speeds. Not of pipelines.
  std::optional<double> launching_seconds{};
  std::string reason{};  ///< of its move
};

/// Upper bounds of the buckets in which step times are counted, in seconds: from a step of a millisecond to one of
/// minutes, about 2.5 times apart. Longer steps have a bucket of their own.
inline constexpr std::array kStepBounds{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,   0.25, 0.5,
                                        1.0,   2.5,    5.0,   10.0, 25.0,  60.0, 150.0, 300.0};

/// What one device did. Totals are since the recorder's creation.
struct DeviceMetrics {
  std::string name;
  std::int64_t items = 0;         ///< since the start
  std::int64_t last_items = 0;    ///< in the last step
  double busy_seconds = 0.0;      ///< computing
  double idle_seconds = 0.0;      ///< inside makespans, waiting for slower devices
  double items_per_second = 0.0;  ///< over the last steps (kWindow), while busy
  double cost = 0.0;              ///< since the start, of the steps with costs
  bool retired = false;           ///< gets no work, by request
  double cost_per_second = 0.0;   ///< as items_per_second; 0 unless all of those steps had costs
};

/// All figures of a trainer at one moment.
struct Metrics {
  std::vector<DeviceMetrics> devices;
  std::int64_t steps = 0;  ///< successful steps; the totals below are over these
  std::int64_t moves = 0;
  double compute_seconds = 0.0;  ///< of makespans
  double step_seconds = 0.0;     ///< with reductions
  /// How many steps took at most kStepBounds[k], but more than the bound before it; the last entry: longer ones.
  std::array<std::int64_t, kStepBounds.size() + 1> step_counts{};
  /// Slowest device's busy time over the mean of those that had items, minus 1, over the last steps (kWindow): 0 is
  /// perfectly even.
  double imbalance = 0.0;
};

/// Collects samples; thread-safe.
class PACELINE_API MetricsRecorder {
 public:
  /// Rates and imbalance cover this many last steps: enough to calm noise, and few enough to show a change.
  static constexpr std::size_t kWindow = 16;

  explicit MetricsRecorder(std::vector<std::string> device_names);
  /// Requires: one entry per device in the sample's vectors. O(devices).
  void add(const StepSample& sample);
  /// From now on the snapshots say whether the device gets no work.
  void set_retired(std::size_t device, bool retired);
  /// Totals, and rates over the last steps. Time grows with kWindow and the number of devices.
  [[nodiscard]] Metrics snapshot() const;

 private:
  mutable std::mutex mutex_;
  Metrics total_;
  std::vector<StepSample> window_;  // ring of the last kWindow samples
};

}  // namespace paceline::observe
