// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/pool_types.hpp>

/// How many devices a pool needs. Pure, as all decisions of a pool (pool.hpp). Work is counted in seconds of a device
/// of speed 1.
namespace paceline::plan {

struct ScaleDevice {
  double speed = 1.0;               ///< work a second
  double price = 1.0;               ///< of a second in which it is active, in any unit
  double activation_seconds = 0.0;  ///< from when it is wanted until it takes work
  double keep_seconds = 0.0;        ///< for which it is kept unneeded: what its return costs
  bool active = true;               ///< takes work, or will when its activation is over
  bool usable = true;               ///< false: lost, or retired by its owner
};

/// What comes.
struct ScaleDemand {
  double work_per_second = 0.0;
  double run_seconds = 0.0;  ///< work of a run, of a job or of a batch, in the mean
  double backlog = 0.0;      ///< work that waits
  /// Mean of the squared coefficients of variation of the gaps between arrivals and of the work of runs: 1 for arrivals
  /// at random with exponential work.
  double variability = 1.0;
  double overhead = 1.0;  ///< work of runs over `work_per_second`, which is that of the largest batches
};

/// The mean wait of a job on devices of these speeds, from its submit until its run begins: until what waits is
/// served, and that of jobs that come at random to a queue in front of as many devices of the mean speed. Infinity if
/// more work comes than the devices do. Smaller batches than the largest keep devices busier, but become larger before
/// devices are too few.
/// Source: Sakasegawa, Annals of the Institute of Statistical Mathematics 29, 1977: rho^(sqrt(2(n+1)) - 1) / (n (1 -
/// rho)) services, times the variability (Allen & Cunneen).
[[nodiscard]] PACELINE_API double predicted_wait(std::span<const double> speeds, const ScaleDemand& demand);

/// The mean wait of a job for its batch to fill, from its submit: until as many came as the largest batch has, or until
/// the first one has waited for `max_delay_seconds`. It passes while jobs wait for a device, too.
[[nodiscard]] PACELINE_API double filling_wait(double jobs_per_second, double max_delay_seconds, double largest);

/// The devices with the least sum of prices whose predicted_wait() is at most `wait_seconds`, of those that are usable
/// and that `may` allows, with all of `must`. All allowed ones if none is enough. Exact up to 12 that may be left out;
/// beyond, devices of the least price for their speed come first.
[[nodiscard]] PACELINE_API std::vector<bool> least_devices(std::span<const ScaleDevice> devices,
                                                           const std::vector<bool>& must, const std::vector<bool>& may,
                                                           const ScaleDemand& demand, double wait_seconds);

/// `wanted`, and as many more devices as the covers need. Of those that would do usable ones come first, then active
/// ones, then those of the least price for their speed.
/// @throws InvalidArgument if `wanted` or a cover is not of as many devices.
[[nodiscard]] PACELINE_API std::vector<bool> with_covers(std::vector<bool> wanted, std::span<const ScaleDevice> devices,
                                                         std::span<const PoolCover> covers);

struct ScaleOptions {
  double wait_seconds = 0.1;  ///< the mean wait; four fifths are planned for, so that most minutes keep it
  double level_gain = 0.1;    ///< Holt's alpha, for a second
  double trend_gain = 0.1;    ///< Holt's beta, for a second
};

/// What happened since the last decision.
struct ScaleTick {
  double seconds = 1.0;  ///< how long that was
  double arrived_work = 0.0;
  double arrived_jobs = 0.0;
  double waiting_work = 0.0;  ///< now
  /// Of the runs in which the jobs that arrived will run: how many, their work, and the sum of its squares. 0: not
  /// known. Then each job counts as a run of exponential work.
  double runs = 0.0;
  double run_work = 0.0;
  double run_square = 0.0;
};

/// Which devices shall be active: as few as meet the target.
///
/// Adds at once, and removes a device once it was not needed for so long that this has cost as much as its return (ski
/// rental: at most twice the price of who knows the future). Work that comes is forecast over the seconds that an
/// activation takes, with its trend where this stands out of the noise of arrivals. Source: Holt, ONR Memorandum 52,
/// 1957 (International Journal of Forecasting 20, 2004).
class PACELINE_API Scaler {
 public:
  /// @throws InvalidArgument if the target is not positive, or a gain is not from 0 to 1.
  explicit Scaler(ScaleOptions options = {});

  /// The devices that shall be active from now on. At least one is, if any is usable. The order of devices is the same
  /// in each call; new ones come last.
  /// @throws InvalidArgument if no time has passed.
  std::vector<bool> decide(std::span<const ScaleDevice> devices, const ScaleTick& tick);

  /// What the last decision was made for. Its backlog is that of the time when a device that is added then takes work.
  [[nodiscard]] const ScaleDemand& demand() const noexcept { return demand_; }
  /// That is predicted for the devices that it wants; infinity if more work comes than they do.
  [[nodiscard]] double wait_seconds() const noexcept { return wait_; }
  /// How many devices the target takes: those that are wanted, and if all together are not enough, as many more of
  /// their mean speed.
  [[nodiscard]] std::size_t desired() const noexcept { return desired_; }

 private:
  void learn(const ScaleTick& tick);
  [[nodiscard]] double trend() const;  // 0 if it may be noise
  void count(std::span<const ScaleDevice> devices, const std::vector<bool>& wanted);

  ScaleOptions options_;
  ScaleDemand demand_;
  ScaleTick seen_;  // sums of all ticks, of which the old ones count less
  bool begun_ = false;
  double level_ = 0.0;
  double trend_ = 0.0;
  double errors_ = 0.0;  // squares of those of forecasts, for a second, of `ticks_` ticks: old ones count less
  double ticks_ = 0.0;
  double wait_ = 0.0;
  std::size_t desired_ = 0;
  std::vector<double> unneeded_;  // seconds, by device
};

}  // namespace paceline::plan
