// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <paceline/plan/cost_model.hpp>

#include "plan/pool/padding.hpp"

namespace paceline::plan {

/// What batches of each size took on one device, where that is not on the line through all of them. Libraries choose
/// their kernels by the size: on one processor 14 rows took twice as long as 16, and as long as 64.
///
/// A size is off the line if its last three batches all took more than a tenth longer, or all more than a tenth
/// shorter, than the line says. It then takes their median. A size that has not run for `kKept` batches is forgotten.
/// So it is tried again.
///
/// A batch of one job never counts as longer than the line. A pool has no smaller size to choose instead. It would
/// refuse jobs with deadlines, and then nothing would run that shows when such a batch is fast again.
class SizeTimes {
 public:
  /// A batch of the size at this place took so long.
  void add(std::size_t place, std::size_t places, double seconds) {
    sizes_.resize(places);
    Size& size = sizes_[place];
    if (runs_ - size.at > kKept) size.count = 0;
    size.last[static_cast<std::size_t>(size.count++ % 3)] = seconds;
    size.at = runs_++;
  }

  /// To be called when the line, or a time, is another one. Whether `seconds` are others now.
  bool compare(const CostModel& line, std::span<const std::int64_t> sizes) {
    const std::vector<double> before = std::exchange(seconds_, {});
    for (std::size_t place = 0; place < sizes_.size(); ++place) {
      const Size& size = sizes_[place];
      const double expected = seconds_of(line, static_cast<double>(sizes[place]));
      std::array<double, 3> last = size.last;
      std::ranges::sort(last);
      const bool longer = last[0] > expected * kClear && place > 0;
      const bool shorter = last[2] * kClear < expected;
      if (size.count < 3 || runs_ - size.at > kKept || !(longer || shorter)) continue;
      if (seconds_.empty()) {
        for (const std::int64_t one : sizes) seconds_.push_back(seconds_of(line, static_cast<double>(one)));
      }
      seconds_[place] = last[1];
    }
    return seconds_ != before;
  }

  /// By size. Empty: all are on the line.
  [[nodiscard]] std::span<const double> seconds() const noexcept { return seconds_; }

 private:
  static constexpr std::int64_t kKept = 256;
  static constexpr double kClear = 1.1;
  struct Size {
    std::array<double, 3> last = {};
    std::int64_t count = 0;
    std::int64_t at = 0;
  };
  std::vector<Size> sizes_ = {};
  std::vector<double> seconds_ = {};
  std::int64_t runs_ = 0;
};

}  // namespace paceline::plan
