// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/observe/metrics.hpp>

namespace paceline::observe {

/// The sums over some consecutive steps. Vectors have one entry per device, in the order of the group. StepSample
/// explains the figures.
struct HistoryRow {
  std::int64_t first_step = 0;  ///< counted from 0 over the steps that succeeded
  std::int64_t steps = 0;
  std::vector<std::int64_t> items{};
  std::vector<double> busy_seconds{};
  std::vector<double> costs{};          ///< empty unless all of these steps had costs
  std::vector<std::int64_t> planned{};  ///< empty if one of these steps had costs
  std::vector<std::int64_t> blocks{};   ///< in the last of these steps
  double step_seconds = 0.0;
  double longest_step_seconds = 0.0;  ///< of one step: a sum would hide a spike
  std::int64_t moves = 0;
  std::optional<double> reduction_seconds{};  ///< empty if it is not known of one of these steps
  std::optional<double> launching_seconds{};  ///< likewise
  std::string reason{};                       ///< of the last move
};

/// A whole run in bounded memory, for a picture of it. At first each row is one step. When `capacity` rows are full,
/// neighbours are merged, and from then on each row holds twice as many steps. So early and late parts of a run have
/// the same resolution, while a ring would forget the beginning. The sums stay exact.
///
/// Adding takes constant time on average. Thread-safe.
class PACELINE_API History {
 public:
  /// About as many as a picture has columns.
  static constexpr std::size_t kCapacity = 1024;

  /// @param capacity rows to keep at most; an odd one counts as the next even one, one below 2 as 2.
  explicit History(std::size_t capacity = kCapacity);

  /// Requires as many entries in the sample's vectors each time.
  void add(const StepSample& sample);
  /// Oldest first, at most `capacity` rows. Each row holds the same number of steps, a power of two; the last row may
  /// hold fewer.
  [[nodiscard]] std::vector<HistoryRow> snapshot() const;
  [[nodiscard]] std::int64_t steps() const;

 private:
  void merge_neighbours();

  mutable std::mutex mutex_;
  std::vector<HistoryRow> rows_;
  std::size_t capacity_;
  std::int64_t steps_per_row_ = 1;
  std::int64_t steps_ = 0;
};

}  // namespace paceline::observe
