// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/plan/cost_model.hpp>

#include "balance/noise_memory.hpp"
#include "balance/shape.hpp"

namespace paceline::balance {

/// What is known about one device.
struct DeviceEstimate {
  std::size_t samples = 0;      ///< steps since the last change point, at most the window
  std::int64_t since_step = 0;  ///< first step of the present regime
  std::int64_t change_points = 0;
  std::int64_t drifts = 0;           ///< times that the window was cut because its newest samples differ
  double scale_before = 0.0;         ///< own_scale before the last change point or drift; 0: there was none
  double own_scale = 0.0;            ///< seconds at the class's reference size, by its own timings; 0: never measured
  double scale = 0.0;                ///< the same, pooled with the devices it cannot be told from
  double noise = 0.0;                ///< relative standard deviation of one step's time, without what is common to all
  double error = 0.0;                ///< relative standard error of `scale`
  double centre_items = 0.0;         ///< mean micro-batch size of the samples: where `own_scale` is measured
  double pooled_centre_items = 0.0;  ///< the same of `scale`
  std::size_t cluster = 0;           ///< equal devices have equal numbers; each class has its own
};

/// A model for each device, of these classes. Those that have none take the fastest one's of their class, or else of
/// all devices. None at all if no device has one.
[[nodiscard]] std::vector<plan::CostModel> completed_models(std::span<const std::optional<plan::CostModel>> models,
                                                            std::span<const std::size_t> classes);

/// Estimates the devices' times from their timings: t_i(n) = scale_i * shape_class(n).
///
/// - Scale: the median of all samples since the device's last change point. A sample is a step's summed seconds over
///   the shape's sum. Raw samples are kept, so a better shape moves all of them together.
/// - Common noise: a split depends only on the devices' ratios, so the factor by which all devices of a step are slower
///   together is taken out of its samples. The factor is a mean over the devices that are well known and no outliers.
///   Without this, windows of different lengths would compare devices under different conditions (on two quiet cores
///   half of the variance of a step's time was common and lasted for hundreds of steps). A device that works alone has
///   no common noise.
/// - Error: the standard error of the median of samples that are correlated as measured (NoiseMemory).
/// - Change point: two successive samples on the same side, beyond max(8 %, 3.5 sigma). The window restarts with them.
///   A single such sample is dropped. If the size changed, the tolerance grows by the uncertainty of the shape.
/// - Excursion: a change that was undone. While excursions of any device are remembered, a change of their size or less
///   must first outlast them. Changes beyond 1.4 times, and the way back, are believed at once. On two quiet cores of a
///   shared host times changed by 20 % for 5 to 20 steps, which no move can follow in time.
/// - Drift: if the newest 24 samples differ from earlier ones by 4 standard errors and 1.5 %, the earlier ones are
///   forgotten.
/// - Equality: devices of one class form clusters. Two clusters are one until their scales differ by 3 standard errors
///   and 1 %.
///
/// In simulation (8 equal devices, 3 % noise) an exponential mean needs 13 to 26 steps to follow a throttle, and this
/// estimator needs 2. Without the clusters the split follows the noise. One device that slows down by half over 400
/// steps costs 1.7 % in them with the rule for drifts, and 3.3 % without.
class Estimator {
 public:
  /// `proportional`: as BalancerOptions::proportional.
  explicit Estimator(const std::vector<DeviceProfile>& profiles, bool proportional = false);

  /// What an earlier run measured of the device. Says how the times of its class depend on the size, as a weak prior.
  void hint(std::size_t device, const plan::CostModel& model);
  /// Takes the evidence of one step. Excluded timings and devices without work leave everything as it is.
  void record(std::int64_t step, const StepTimings& timings);

  [[nodiscard]] bool has_evidence() const { return has_evidence_; }
  [[nodiscard]] const std::vector<DeviceEstimate>& devices() const { return estimates_; }
  [[nodiscard]] const ShapeEstimator& shape_of(std::size_t device) const {
    return shapes_[devices_[device].device_class];
  }
  [[nodiscard]] std::size_t class_of(std::size_t device) const { return devices_[device].device_class; }
  [[nodiscard]] std::size_t class_count() const { return shapes_.size(); }

  /// Seconds for n items. Requires has_evidence().
  [[nodiscard]] plan::CostModel model(std::size_t device) const;
  /// Relative standard error of model(device) at `items` items.
  [[nodiscard]] double error_at(std::size_t device, double items) const;
  /// Whether the device's last time was an outlier. It becomes a change point if the next times agree with it.
  [[nodiscard]] bool doubtful(std::size_t device) const { return !devices_[device].outliers.empty(); }
  /// Whether the conditions of the last step may not last: some time was an outlier.
  [[nodiscard]] bool unsettled() const;
  /// Relative standard deviation of one step's time, over all devices.
  [[nodiscard]] double pooled_noise() const { return pooled_noise_; }
  /// Change points of all devices so far.
  [[nodiscard]] std::int64_t change_points() const;

 private:
  /// One device's evidence of one step. It is raw, because the shape may change.
  struct Sample {
    double seconds = 0.0;  // without the common factor, once that is known
    double count = 0.0;
    double items = 0.0;
    double common = 1.0;  // the factor that is common to all devices of its step
    double to_own = 1.0;  // times the residual gives the device's own noise; 0: the residual says nothing about it
  };
  struct Evidence {
    Sample sample;
    std::int64_t step = 0;
    std::vector<MicroBatchTiming> parts;
  };
  struct Grouped {
    std::size_t cluster = 0;
    std::int64_t since_step = 0;  // of the regime that it was grouped in
  };
  struct Excursion {
    double size = 0.0;  // in logs
    std::int64_t steps = 0;
  };
  struct Device {
    std::size_t device_class = 0;    // of shapes_
    std::size_t member = 0;          // its number in that shape
    std::vector<Sample> window;      // oldest first
    double relative_scale = 0.0;     // the scale at a common factor of 1
    std::vector<Evidence> outliers;  // in a row, on one side
    std::int64_t last_step = 0;      // whose sample was none of these
    double change_size = 0.0;        // of the last change point, in logs; 0: there was none, or it was a way back
    std::optional<Grouped> grouped;  // at last
  };

  [[nodiscard]] static Evidence evidence_of(std::int64_t step, const std::vector<MicroBatchTiming>& timings);
  void set_references(const std::vector<Evidence>& evidence);
  void separate_common_noise(std::vector<Evidence>& evidence);
  [[nodiscard]] double shape_error(std::size_t device, const Sample& sample) const;
  [[nodiscard]] double tolerance(std::size_t device, const Sample& sample) const;
  [[nodiscard]] double deviation(std::size_t device, const Sample& sample) const;
  void take(std::size_t device, Evidence evidence);
  [[nodiscard]] bool is_back(std::size_t device, double allowed) const;
  void change(std::size_t device, double allowed);
  void undone(double size, std::int64_t steps);
  [[nodiscard]] double run_size(std::size_t device) const;
  [[nodiscard]] std::int64_t steps_to_believe(double size) const;
  void follow_drift(std::size_t device, std::int64_t step);
  void accept(std::size_t device, const Evidence& evidence);
  [[nodiscard]] double ratio(std::size_t device, const Sample& sample) const;
  [[nodiscard]] double error_of(double noise, std::size_t samples) const;
  void measure_common_noise();
  void measure_scales();
  void pool_equals();

  std::vector<ShapeEstimator> shapes_;
  std::vector<Device> devices_;
  std::vector<DeviceEstimate> estimates_;
  NoiseMemory memory_;
  std::vector<Excursion> excursions_;  // of all devices, oldest first
  std::vector<double> log_factors_;    // the common ones of the newest steps
  double known_devices_ = 1.0;         // that the last one was measured by
  double common_level_ = 1.0;          // the usual factor of late
  double common_noise_ = 0.0;          // relative standard deviation of a step's factor
  double pooled_noise_;
  bool has_evidence_ = false;
};

}  // namespace paceline::balance
