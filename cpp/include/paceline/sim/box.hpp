// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::sim {

/// A simulated device. It takes (fixed + per_item * n) / speed seconds for n > 0 items, and 0 for none. The start-up
/// seconds of its limits are added, outside of the time that it reports.
struct SimDevice {
  std::string name;
  std::string device_class = "sim";
  double speed = 1.0;
  double fixed_seconds = 0.004;
  double per_item_seconds = 0.0001;
  plan::ShareLimits limits = {};  ///< e.g. its memory; planner, balancer and oracle know them
  /// Added to the first run of each size (compilation, autotuning, graph capture); such a run is reported as excluded.
  double first_run_seconds = 0.0;
};

/// The device takes `factor` times as long in steps [from, to).
struct Throttle {
  std::size_t device = 0;
  double factor = 2.0;
  std::int64_t from = 0;
  std::int64_t to = 0;
};

/// The device takes `first_factor` times as long up to step `from`, and `last_factor` times as long from step `to` on.
/// In between the factor changes linearly. Examples: warming up, heating up.
struct Drift {
  std::size_t device = 0;
  double first_factor = 1.0;
  double last_factor = 1.5;
  std::int64_t from = 0;
  std::int64_t to = 0;
};

/// The device stands still for `seconds` in step `first`, and again every `every` steps (0: only once). Examples:
/// compilation in the first step, garbage collection, one bad sample. No split avoids it, so the oracle ignores it.
struct Pause {
  std::size_t device = 0;
  double seconds = 0.0;
  std::int64_t first = 0;
  std::int64_t every = 0;
};

/// The device begins steps [from, to) `seconds` later than the others. Example: other programs hold its core.
struct LateStart {
  std::size_t device = 0;
  double seconds = 0.0;
  std::int64_t from = 0;
  std::int64_t to = 0;
};

/// Noise that outlasts a step: the correlation of log times `n` steps apart is exp(-n / steps).
struct LastingNoise {
  double deviation = 0.0;  ///< standard deviation of log times
  double steps = 10.0;
  bool common = false;  ///< true: all devices have the same noise (clocks, memory); false: each has its own
};

/// The device stops for good in step `step`.
struct Failure {
  std::size_t device = 0;
  std::int64_t step = 0;
};

struct BoxOptions {
  std::vector<SimDevice> devices = {};
  double noise = 0.0;  ///< every time is multiplied by exp(noise * Z), Z standard normal and independent
  std::vector<LastingNoise> lasting_noise = {};  ///< each multiplies on top of `noise`
  double spike_probability = 0.0;                ///< jitter: a device's step is `spike_factor` times longer, so often
  double spike_factor = 1.0;
  std::vector<Throttle> throttles = {};
  std::vector<Drift> drifts = {};
  std::vector<Pause> pauses = {};
  std::vector<LateStart> late_starts = {};
  std::vector<Failure> failures = {};
  /// Seconds each step ends later when k devices have work, at index k (index 0 unused), or empty: the reduction.
  std::vector<double> reduction_seconds = {};
  std::uint64_t seed = 0;
};

/// The outcome of a step. A step with a failed device is lost and has no `timings`.
struct StepOutcome {
  balance::StepTimings timings;
  double seconds = 0.0;
  double first_run_seconds = 0.0;  ///< the longest first run of a size in this step; `seconds` contains it
  std::optional<std::size_t> failed_device;
};

/// The devices of one machine on a virtual clock. A step advances the clock by the time that the options say, and takes
/// no real time.
///
/// Deterministic: the time of a device in a step depends only on the seed, the step, the device and its share, and, if
/// first runs cost, on the sizes that it ran before. Not thread-safe.
class PACELINE_API Box {
 public:
  /// @throws InvalidArgument if a device or an event is not valid; the message names it.
  explicit Box(BoxOptions options);

  /// Runs one step and advances the clock by its makespan. If a device with a share fails in this step, the step is
  /// lost and the outcome names the device. A failed device must not get a share again.
  StepOutcome run(std::int64_t step, const std::vector<std::int64_t>& shares);

  /// Seconds since the box was made.
  [[nodiscard]] double now() const noexcept { return now_seconds_; }

  /// The true models at a step, with throttles and without noise.
  [[nodiscard]] std::vector<plan::CostModel> models(std::int64_t step) const;
  /// Per device: how much later than the others it begins this step.
  [[nodiscard]] std::vector<double> late(std::int64_t step) const;
  [[nodiscard]] bool alive(std::size_t device, std::int64_t step) const;
  /// The seconds of a step with `shares`, with start-up and reduction, without noise, pauses and first runs.
  [[nodiscard]] double makespan(std::int64_t step, const std::vector<std::int64_t>& shares) const;
  /// The split with the least makespan at a step, by the true models over the devices alive.
  [[nodiscard]] std::vector<std::int64_t> best_split(std::int64_t step, std::int64_t batch_size) const;
  /// The makespan of best_split(): the oracle.
  [[nodiscard]] double ideal(std::int64_t step, std::int64_t batch_size) const;

  [[nodiscard]] const BoxOptions& options() const noexcept { return options_; }

 private:
  [[nodiscard]] double slowdown(std::size_t device, std::int64_t step) const;
  [[nodiscard]] double pause(std::size_t device, std::int64_t step) const;
  [[nodiscard]] double reduction(const std::vector<std::int64_t>& shares) const;
  [[nodiscard]] double lasting_noise(std::size_t device, std::int64_t step);
  BoxOptions options_;
  std::vector<std::vector<double>> lasting_;        // the present value of each term, per device
  std::vector<std::vector<double>> lasting_noise_;  // their sums, per step that was asked for or before it, and device
  std::vector<std::set<std::int64_t>> sizes_run_;   // per device; kept only where first runs cost
  double now_seconds_ = 0.0;
};

}  // namespace paceline::sim
