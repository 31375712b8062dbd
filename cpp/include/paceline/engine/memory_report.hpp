// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace paceline {

/// A device's limit, and what was learned under it: a micro-batch takes `fixed_bytes`, and `bytes_per_item` for each
/// item.
struct MemoryReport {
  std::string device;
  std::int64_t limit_bytes = 0;

  /// Of the kind of batch whose items take most memory; none before one was measured.
  struct Items {
    double fixed_bytes = 0.0;
    double bytes_per_item = 0.0;
    std::optional<std::int64_t> largest_micro_batch{};  ///< none: any
  };
  std::optional<Items> items{};

  /// Of batches with costs. The size of a micro-batch is its cost if all of its items cost as much as the longest.
  struct Costs {
    double fixed_bytes = 0.0;
    double bytes_per_cost = 0.0;
    std::optional<double> largest_padded_cost{};  ///< none: any
  };
  std::optional<Costs> costs{};
};

}  // namespace paceline
