// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace paceline {

/// A device's memory limit, and what its micro-batches were measured to take: `fixed_bytes`, plus `bytes_per_item` for
/// each item.
struct MemoryReport {
  std::string device;
  std::int64_t limit_bytes = 0;

  /// For batches without costs, of the kind whose items take most memory. None before the first measurement.
  struct Items {
    double fixed_bytes = 0.0;
    double bytes_per_item = 0.0;
    std::optional<std::int64_t> largest_micro_batch{};  ///< none: any
  };
  std::optional<Items> items{};

  /// For batches with costs. The size of a micro-batch is its padded cost: the number of its items times the longest
  /// item's cost.
  struct Costs {
    double fixed_bytes = 0.0;
    double bytes_per_cost = 0.0;
    std::optional<double> largest_padded_cost{};  ///< none: any
  };
  std::optional<Costs> costs{};
};

}  // namespace paceline
