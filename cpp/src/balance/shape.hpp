// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline::balance {

/// The size dependence that all devices of a class share: f(n) = phi + (1 - phi) * n / reference, so f(reference) = 1.
///
/// phi, the fixed part of the time at the reference size, is the only unknown; a device's time is its scale times f.
struct Shape {
  double reference_items = 1.0;
  double fixed_fraction = 0.3;

  [[nodiscard]] double at(double items) const {
    return fixed_fraction + (1.0 - fixed_fraction) * items / reference_items;
  }
  /// f summed over `count` micro-batches of `items` items together.
  [[nodiscard]] double sum(double count, double items) const {
    return count * fixed_fraction + (1.0 - fixed_fraction) * items / reference_items;
  }
  /// The derivative of log f(items) by the fixed fraction.
  [[nodiscard]] double sensitivity(double items) const { return (1.0 - items / reference_items) / at(items); }
};

/// Learns the shape of one class of devices from timings alone.
///
/// Only contrasts count: sizes that one device ran close in time and at one speed. So samples are kept in groups, one
/// group per device, regime (between two change points) and stretch of 48 steps; each group has its own unknown level,
/// and the levels are profiled out. Comparing times that lie far apart would read slow heating as a shape. The fit is a
/// Huber regression of log seconds (P. J. Huber, 1964) with a weak prior, so that with one size seen the prior
/// decides, and its error says so. A non-negative constant and slope are ensured by 0 <= phi <= 0.98.
///
/// Memory is bounded: at most 5 groups of 6 sizes of 16 samples per device. fit() costs a few microseconds and does
/// nothing when no informative sample came since the last one. Not thread-safe.
class ShapeEstimator {
 public:
  /// `proportional`: it is known that nothing of the time is fixed, so there is nothing to learn.
  explicit ShapeEstimator(std::size_t members, bool proportional = false)
      : members_(members), proportional_(proportional) {
    if (proportional) shape_.fixed_fraction = error_ = 0.0;
  }

  /// Where f is 1; set once, before the first sample.
  void set_reference(double items);
  [[nodiscard]] bool has_reference() const { return has_reference_; }

  void add(std::size_t member, std::int64_t step, std::int64_t items, double seconds);
  /// The member's speed changed: what comes is not comparable in level with what was.
  void restart(std::size_t member);
  /// `noise`: relative standard deviation of one sample.
  void fit(double noise);

  [[nodiscard]] const Shape& shape() const { return shape_; }
  /// Standard error of the fixed fraction.
  [[nodiscard]] double error() const { return error_; }
  /// Relative standard error of f(to) / f(from) that comes from not knowing the shape.
  [[nodiscard]] double ratio_error(double from, double to) const;

 private:
  struct Cell {
    std::int64_t items = 0;
    std::vector<double> log_seconds;
    std::vector<double> weights;
  };
  struct Group {
    std::int64_t first_step = 0;
    std::vector<Cell> cells;
    [[nodiscard]] double information(double reference) const;
  };
  struct Member {
    Group open;
    std::vector<Group> closed;
  };
  struct Sums {
    double information = 0.0;
    double gradient = 0.0;
    double misfit = 0.0;
    double freedom = 0.0;
  };

  void close(Member& member);
  [[nodiscard]] Sums accumulate(Group& group, double noise, bool first) const;

  std::vector<Member> members_;
  bool proportional_;
  Shape shape_;
  double error_ = 0.3;
  bool has_reference_ = false;
  bool stale_ = false;
};

}  // namespace paceline::balance
