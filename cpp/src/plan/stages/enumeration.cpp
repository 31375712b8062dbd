// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <vector>

#include "plan/stages/stage_search.hpp"

namespace paceline::plan {
namespace {

// Most of what is counted falls to the bound, so this many take a few milliseconds.
constexpr double kMostPlans = 200'000;

double choose(double n, double k) {
  double ways = 1.0;
  for (double i = 0; i < k; ++i) ways *= (n - i) / (i + 1.0);
  return ways;
}

/// How many plans there are, without what memory forbids.
double plan_count(const StageSearch& search, const std::vector<std::int64_t>& micro_batches) {
  const auto blocks = static_cast<double>(search.costs.blocks());
  const auto devices = static_cast<double>(search.costs.devices());
  double count = 0.0;
  double orders = 1.0;
  for (double stages = 1; stages <= std::min(blocks, devices); ++stages) {
    orders *= devices - stages + 1.0;
    const auto given =
        static_cast<double>(search.options.cuts.empty() ? search.options.order.size() : search.options.cuts.size());
    if (given > 0 && given != stages) continue;
    const double partitions = (search.options.order.empty() ? orders : 1.0) *
                              (search.options.cuts.empty() ? choose(blocks - 1.0, stages - 1.0) : 1.0);
    for (const std::int64_t m : micro_batches)
      count += partitions * choose(static_cast<double>(m) + stages - 2, stages - 1);
  }
  return count;
}

class Enumeration {
 public:
  Enumeration(const StageSearch& search, std::int64_t micro_batches)
      : search_(search), micro_batches_(micro_batches), used_(search.costs.devices(), 0) {}

  void run(std::size_t from = 0) {
    const std::size_t stage = partition_.stages();
    const StageOptions& options = search_.options;
    const std::size_t blocks = search_.costs.blocks();
    if (from == blocks) {
      if (options.order.empty() || options.order.size() == stage) search_.offer_all(partition_, micro_batches_);
      return;
    }
    for (std::size_t device = 0; device < used_.size(); ++device) {
      if (used_[device] != 0 || !search_.fits_options(stage, device)) continue;
      used_[device] = 1;
      partition_.cuts.push_back(from);
      partition_.order.push_back(device);
      for (std::size_t to = from + 1; to <= blocks; ++to) {
        const bool given = stage + 1 < options.cuts.size() ? to == options.cuts[stage + 1] : to == blocks;
        if (options.cuts.empty() || given) run(to);
      }
      partition_.cuts.pop_back();
      partition_.order.pop_back();
      used_[device] = 0;
    }
  }

 private:
  const StageSearch& search_;
  const std::int64_t micro_batches_;
  std::vector<char> used_;
  Partition partition_;
};

}  // namespace

bool try_all(const StageSearch& search, const std::vector<std::int64_t>& micro_batches) {
  if (plan_count(search, micro_batches) > kMostPlans) return false;
  for (const std::int64_t m : micro_batches) Enumeration(search, m).run();
  return true;
}

}  // namespace paceline::plan
