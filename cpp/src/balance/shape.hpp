// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace paceline::balance {

/// The size dependence that all devices of a class share: f(n) = phi + (1 - phi) * n / reference, so f(reference) = 1.
///
/// The only unknown is phi, the fixed part of the time at the reference size. A device's time is its scale times f.
struct Shape {
  double reference_items = 1.0;
  double fixed_fraction = 0.3;  // fixed parts of 0 to 60 % at an even share are what training shows

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
/// It compares sizes that one device ran within few steps and at one speed. Samples are kept in groups: one for each
/// device, regime (between two change points) and stretch of 48 steps. Each group has an unknown level of its own,
/// which the fit eliminates. Over longer stretches slow heating would look like a shape. The fit is a least-squares
/// regression with a weak prior, by the median log seconds of each size in a group, so that a wild sample counts
/// little. With one size seen, the prior decides, and error() says so. 0 <= phi <= 0.98 keeps constant and slope from
/// being negative.
///
/// Memory is bounded: at most 5 groups of 6 sizes of 16 samples per device. fit() takes a few microseconds, and nothing
/// without a new informative sample. Not thread-safe.
class ShapeEstimator {
 public:
  /// `proportional`: no part of the time is fixed, so there is nothing to learn.
  explicit ShapeEstimator(std::size_t members, bool proportional = false)
      : members_(members), proportional_(proportional) {
    if (proportional) shape_.fixed_fraction = error_ = 0.0;
  }

  /// What an earlier run measured: the fixed part of the time is that of so many items. Takes the prior's place.
  void hint(double fixed_items) { hinted_items_ = fixed_items; }
  /// Where f is 1; set once, before the first sample.
  void set_reference(double items);
  [[nodiscard]] bool has_reference() const { return has_reference_; }

  void add(std::size_t member, std::int64_t step, std::int64_t items, double seconds);
  /// The member's speed has changed, so later samples have another level.
  void restart(std::size_t member);
  /// `noise`: relative standard deviation of one sample.
  void fit(double noise);

  [[nodiscard]] const Shape& shape() const { return shape_; }
  /// Standard error of the fixed fraction.
  [[nodiscard]] double error() const { return error_; }
  /// The relative standard error of f(to) / f(from) because of error().
  [[nodiscard]] double ratio_error(double from, double to) const;

 private:
  struct Cell {
    std::int64_t items = 0;
    std::vector<double> log_seconds{};
    double middle = 0.0;  // their median
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
  };

  void close(Member& member);
  [[nodiscard]] Sums accumulate(const Group& group) const;

  std::vector<Member> members_;
  bool proportional_;
  Shape shape_;
  std::optional<double> hinted_items_;
  double prior_fraction_ = shape_.fixed_fraction;
  double error_ = 0.3;
  double prior_error_ = error_;
  bool has_reference_ = false;
  bool stale_ = false;
};

}  // namespace paceline::balance
