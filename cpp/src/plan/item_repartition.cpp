// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "item_problem.hpp"

namespace paceline::plan::detail {
namespace {

// Found by trying: more steps hardly lower the makespan further, and other devices have their turn.
constexpr std::int64_t kPairSteps = std::int64_t{1} << 11;
constexpr std::int64_t kTripleSteps = std::int64_t{1} << 14;
// Beyond, exchanges leave nothing that shows, and the search goes as deep as there are items.
constexpr std::size_t kMostItems = 1024;

class Repartition {
 public:
  Repartition(const ItemProblem& problem, double target, std::int64_t steps, Holdings& holdings)
      : problem_(problem), target_(target), steps_left_(steps), holdings_(holdings) {}

  // Pairs first, the earliest partner first; triples when no pair helps.
  bool improve() {
    const std::size_t from = latest_of(problem_, holdings_);
    const double latest = finish_of(problem_, holdings_, from);
    if (latest <= target_) return false;
    std::vector<std::size_t> others;
    for (std::size_t device = 0; device < problem_.devices(); ++device) {
      if (device != from) others.push_back(device);
    }
    std::stable_sort(others.begin(), others.end(), [&](std::size_t a, std::size_t b) {
      return finish_of(problem_, holdings_, a) < finish_of(problem_, holdings_, b);
    });
    for (const std::size_t other : others) {
      if (split_anew({from, other}, latest)) return true;
    }
    for (std::size_t second = 1; second < others.size(); ++second) {
      for (std::size_t first = 0; first < second; ++first) {
        if (split_anew({from, others[first], others[second]}, latest)) return true;
      }
    }
    return false;
  }

 private:
  bool split_anew(std::vector<std::size_t> devices, double latest) {
    std::size_t count = 0;
    for (const std::size_t device : devices) count += holdings_[device].ranks.size();
    if (count > kMostItems || steps_left_ <= 0) return false;
    const std::int64_t steps = devices.size() == 2 ? kPairSteps : kTripleSteps;
    TreeSearch search{.devices = std::move(devices),
                      .ranks = {},
                      .below = latest,
                      .target = target_,
                      .steps = std::min(steps, steps_left_)};
    for (const std::size_t device : search.devices) {
      const std::vector<Rank>& ranks = holdings_[device].ranks;
      search.ranks.insert(search.ranks.end(), ranks.begin(), ranks.end());
    }
    std::sort(search.ranks.begin(), search.ranks.end());
    const TreeResult result = search_tree(problem_, search);
    steps_left_ -= result.steps;
    if (result.found) apply(problem_, search, result, holdings_);
    return result.found;
  }

  const ItemProblem& problem_;
  double target_;
  std::int64_t steps_left_;
  Holdings& holdings_;
};

}  // namespace

void repartition(const ItemProblem& problem, double target, std::int64_t steps, Holdings& holdings) {
  Repartition search(problem, target, steps, holdings);
  while (search.improve()) exchange_items(problem, target, holdings);
}

}  // namespace paceline::plan::detail
