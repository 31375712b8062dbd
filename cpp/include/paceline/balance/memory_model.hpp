// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include <paceline/export.hpp>

namespace paceline::balance {

/// How much memory a micro-batch takes: `fixed + per_size * size` bytes, through the smallest and the largest size that
/// were measured. A size is a number of items, or a cost.
///
/// With one size measured, all of its memory is assumed to grow with the size. For larger sizes that predicts too much,
/// never too little.
class PACELINE_API MemoryModel {
 public:
  /// A micro-batch of this size, above zero, took so many bytes at most. Of one size the larger measurement counts.
  /// Zero bytes: nothing was seen.
  void add(double size, std::int64_t bytes);

  /// How many sizes the model stands on: none, one or two.
  [[nodiscard]] int sizes() const { return static_cast<int>(bytes_.size()); }
  /// Whether another size is worth measuring. False if measurements keep showing nothing, as on a host that only
  /// predicts.
  [[nodiscard]] bool wants_more() const { return sizes() < 2 && silent_ < 3; }
  /// The largest size that was measured; none before the first.
  [[nodiscard]] std::optional<double> largest() const;
  [[nodiscard]] double bytes_per_size() const;
  [[nodiscard]] double fixed_bytes() const;
  /// The largest size that fits, not below zero. None as long as nothing is known, or where any size fits.
  [[nodiscard]] std::optional<double> most(std::int64_t limit_bytes) const;

 private:
  std::map<double, std::int64_t> bytes_;  // of the smallest and of the largest size
  int silent_ = 0;
};

}  // namespace paceline::balance
