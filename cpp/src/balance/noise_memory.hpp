// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace paceline::balance {

/// Measures how long the noise of devices lasts.
///
/// The noise of real cores outlasts a step, so the mean of n successive times is less certain than that of n
/// independent times. On two quiet cores the log ratio had correlations of 0.36, 0.27, 0.13 and 0.03 at lags 1, 2, 5
/// and 10, and a mean of 20 to 200 steps had twice the standard error of independent times.
///
/// Correlations come from the variogram, pooled over devices: half the mean square difference of residuals j steps
/// apart over that of residuals far apart. This needs no mean, which a window of few samples does not know. The sum of
/// the correlations ends where a pair of neighbours is not positive (Geyer's initial positive sequence, Statistical
/// Science 7, 1992). Otherwise the sum of estimation errors would grow with the number of lags. Not thread-safe.
class NoiseMemory {
 public:
  explicit NoiseMemory(std::size_t devices) : recent_(devices) {}

  /// Takes a device's next residual, in units of a log time.
  void add(std::size_t device, double residual);
  /// The device's speed has changed, so later residuals do not compare with earlier ones.
  void restart(std::size_t device) { recent_[device].clear(); }

  /// The variance of a mean of `samples` successive values over that of as many independent ones; at least 1.
  [[nodiscard]] double variance_factor(std::size_t samples) const;

 private:
  static constexpr std::size_t kLags = 16;  // noise that lasts much longer is a change of speed
  static constexpr std::size_t kFar = 24;   // lags above kLags, up to this one, give the variance
  struct Lag {
    double squares = 0.0;
    double count = 0.0;
  };
  void correlate() const;

  std::vector<std::vector<double>> recent_;  // per device, newest last
  std::array<Lag, kFar> lags_{};
  mutable std::array<double, kLags> correlations_{};  // of lags_, where that is not stale
  mutable bool stale_ = true;
};

}  // namespace paceline::balance
