// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::sim {

/// A simulated device: (fixed + per_item * n) / speed seconds for n > 0 items, nothing for none.
struct SimDevice {
  std::string name;
  std::string device_class = "sim";
  double speed = 1.0;
  double fixed_seconds = 0.004;
  double per_item_seconds = 0.0001;
  plan::ShareLimits limits;  ///< e.g. its memory: told to planner and balancer, and to the oracle
};

/// The device takes `factor` times as long in steps [from, to).
struct Throttle {
  std::size_t device = 0;
  double factor = 2.0;
  std::int64_t from = 0;
  std::int64_t to = 0;
};

/// The device stops for good in step `step`.
struct Failure {
  std::size_t device = 0;
  std::int64_t step = 0;
};

struct BoxOptions {
  std::vector<SimDevice> devices;
  double noise = 0.0;              ///< every time is multiplied by exp(noise * Z), Z standard normal
  double spike_probability = 0.0;  ///< jitter: a device's step is `spike_factor` times longer, so often
  double spike_factor = 1.0;
  std::vector<Throttle> throttles;
  std::vector<Failure> failures;
  std::uint64_t seed = 0;
};

/// What a step did. A step with a failed device is lost: `timings` are those of nobody.
struct StepOutcome {
  balance::StepTimings timings;
  double seconds = 0.0;
  std::optional<std::size_t> failed_device;
};

/// The devices of one machine on a virtual clock: what runs takes the time the options say, and no time at all.
///
/// Deterministic: the time of a device in a step depends on the seed, the step, the device and its share only. Not
/// thread-safe.
class PACELINE_API Box {
 public:
  /// @throws InvalidArgument naming the device or event that makes no sense.
  explicit Box(BoxOptions options);

  /// Runs one step and advances the clock by its makespan. Where a device with a share fails in this step, the time of
  /// the others is lost and the outcome names it; failed devices must not get a share again.
  StepOutcome run(std::int64_t step, const std::vector<std::int64_t>& shares);

  /// Seconds since the box was made.
  [[nodiscard]] double now() const noexcept { return now_seconds_; }

  /// True models at a step, throttles included, noise not.
  [[nodiscard]] std::vector<plan::CostModel> models(std::int64_t step) const;
  [[nodiscard]] bool alive(std::size_t device, std::int64_t step) const;
  /// Noise-free makespan of `shares` at a step.
  [[nodiscard]] double makespan(std::int64_t step, const std::vector<std::int64_t>& shares) const;
  /// Noise-free makespan of the best split at a step, by the true models over the devices alive: the oracle.
  [[nodiscard]] double ideal(std::int64_t step, std::int64_t batch_size) const;

  [[nodiscard]] const BoxOptions& options() const noexcept { return options_; }

 private:
  [[nodiscard]] double slowdown(std::size_t device, std::int64_t step) const;
  BoxOptions options_;
  double now_seconds_ = 0.0;
};

}  // namespace paceline::sim
