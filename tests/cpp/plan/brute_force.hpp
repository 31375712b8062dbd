// SPDX-License-Identifier: Apache-2.0
#pragma once

// The contract of split_batch written a second time, as plainly as possible: try every split and compare by the
// documented order.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/plan/split.hpp>

namespace paceline::plan::testing {

struct Case {
  std::int64_t batch_size = 0;
  std::vector<CostModel> models;
  SplitOptions options;
};

inline ShareLimits limits_of(const Case& c, std::size_t i) {
  return c.options.limits.empty() ? ShareLimits{} : c.options.limits[i];
}

inline double seconds_of(const Case& c, std::size_t i, std::int64_t items) {
  return c.models[i].seconds(items) + limits_of(c, i).startup_seconds;
}

inline bool allowed(const Case& c, const std::vector<std::int64_t>& shares) {
  std::int64_t sum = 0;
  std::int64_t uneven = 0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const ShareLimits limits = limits_of(c, i);
    if (shares[i] == 0 ? !limits.may_be_zero : shares[i] < limits.minimum || shares[i] > limits.maximum) return false;
    sum += shares[i];
    if (shares[i] % c.options.granularity != 0) ++uneven;
  }
  const std::int64_t remainder = c.batch_size % c.options.granularity;
  return sum == c.batch_size && uneven == (remainder != 0 ? 1 : 0);
}

inline double makespan_of(const Case& c, const std::vector<std::int64_t>& shares) {
  double latest = 0.0;
  std::size_t working = 0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) continue;
    ++working;
    latest = std::max(latest, seconds_of(c, i, shares[i]));
  }
  return c.options.reduction_seconds.empty() || working == 0 ? latest : latest + c.options.reduction_seconds[working];
}

// Smaller is better: the makespan, then the three rules for ties in split.hpp.
using Rank = std::tuple<double, std::int64_t, std::vector<int>, std::vector<double>, std::vector<std::int64_t>>;

inline Rank rank_of(const Case& c, const std::vector<std::int64_t>& shares) {
  std::int64_t changes = 0;
  std::vector<int> roles;
  std::vector<double> grain_finishes;
  std::vector<std::int64_t> more_to_lower;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const bool changed = !c.options.previous.empty() && shares[i] != c.options.previous[i];
    const bool kept = !c.options.previous.empty() && !changed;
    changes += changed ? 1 : 0;
    roles.push_back(kept ? 3 : shares[i] == 0 ? 2 : shares[i] % c.options.granularity == 0 ? 1 : 0);
    for (std::int64_t n = shares[i]; n > 0; n -= c.options.granularity) grain_finishes.push_back(seconds_of(c, i, n));
    more_to_lower.push_back(-shares[i]);
  }
  std::sort(grain_finishes.begin(), grain_finishes.end(), std::greater<>());
  return {makespan_of(c, shares), changes, roles, grain_finishes, more_to_lower};
}

inline std::optional<std::vector<std::int64_t>> best_by_brute_force(const Case& c) {
  std::optional<std::vector<std::int64_t>> best;
  Rank best_rank;
  std::vector<std::int64_t> shares(c.models.size(), 0);
  const std::function<void(std::size_t, std::int64_t)> visit = [&](std::size_t i, std::int64_t left) {
    if (i + 1 == shares.size()) {
      shares[i] = left;
      if (!allowed(c, shares)) return;
      if (best && makespan_of(c, shares) > std::get<0>(best_rank)) return;
      Rank rank = rank_of(c, shares);
      if (best && !(rank < best_rank)) return;
      best = shares;
      best_rank = std::move(rank);
      return;
    }
    for (std::int64_t n = 0; n <= left; ++n) {
      shares[i] = n;
      visit(i + 1, left - n);
    }
  };
  visit(0, c.batch_size);
  return best;
}

inline std::string describe(const std::vector<std::int64_t>& shares) {
  std::ostringstream out;
  out << "[";
  for (const std::int64_t n : shares) out << n << " ";
  out << "]";
  return out.str();
}

// Everything needed to reproduce the case.
inline std::string describe(const Case& c) {
  std::ostringstream out;
  out.precision(17);
  out << "batch " << c.batch_size << " granularity " << c.options.granularity << "\n";
  for (std::size_t i = 0; i < c.models.size(); ++i) {
    const ShareLimits limits = limits_of(c, i);
    out << "  device " << i << ": ";
    out << c.models[i].fixed_seconds() << " + " << c.models[i].per_item_seconds() << " n";
    out << " minimum " << limits.minimum << " maximum " << limits.maximum << " may_be_zero " << limits.may_be_zero
        << " startup " << limits.startup_seconds << "\n";
  }
  out << "  reduction";
  for (const double seconds : c.options.reduction_seconds) out << " " << seconds;
  out << "\n  previous " << describe(c.options.previous);
  return out.str();
}

}  // namespace paceline::plan::testing
