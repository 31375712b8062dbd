// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/padded_items.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "item_checks.hpp"
#include "item_problem.hpp"
#include "padded_cover.hpp"

namespace paceline::plan {
namespace {

using detail::DeviceKind;
using detail::ItemProblem;
using detail::padded_seconds;
using detail::PaddedCover;
using detail::PaddedGroup;
using detail::PaddedProblem;
using detail::Rank;

ItemProblem problem_of(std::span<const double> costs, std::span<const LoadModel> models) {
  detail::validate_items(costs, models, {});
  ItemProblem problem;
  problem.order = detail::descending_order(costs);
  for (const Rank item : problem.order) problem.cost.push_back(costs[item]);
  problem.models.assign(models.begin(), models.end());
  problem.caps.resize(models.size());
  for (std::size_t device = 0; device < models.size() && !costs.empty(); ++device) {
    if (std::isfinite(padded_seconds(models[device], costs.size(), problem.cost.front()))) continue;
    throw InvalidArgument(fmt::format(
        "device {} would need more seconds than a double holds for all items, padded to the longest; check the units",
        device));
  }
  return problem;
}

/// Cuts groups off the sorted items until none are left.
class PaddedDealer {
 public:
  explicit PaddedDealer(const ItemProblem& problem) : problem_(problem), ones_(problem.items(), 1.0) {
    std::vector<std::size_t> devices(problem.devices());
    std::iota(devices.begin(), devices.end(), std::size_t{0});
    const auto pace = [&](std::size_t device) {
      const LoadModel& model = problem.models[device];
      return std::pair{model.seconds_per_cost, model.fixed_seconds};
    };
    std::stable_sort(devices.begin(), devices.end(), [&](auto a, auto b) { return pace(a) < pace(b); });
    for (const std::size_t device : devices) {
      if (rest_.kinds.empty() || problem.models[device] != rest_.kinds.back().model) {
        rest_.kinds.push_back({problem.models[device], 0});
        waiting_.emplace_back();
      }
      ++rest_.kinds.back().devices;
      waiting_.back().push_back(device);
    }
    rest_.everyone = problem.items() >= problem.devices();
    begin_.assign(problem.devices(), 0);
    count_.assign(problem.devices(), 0);
  }

  /// Whether the makespan is proven to be the least.
  bool deal() {
    bool exact = true;
    for (std::size_t dealt = 0; dealt < problem_.items();) {
      rest_.cost = std::span(problem_.cost).subspan(dealt);
      // Whoever gets some is as late with many of these as with one.
      if (rest_.everyone && rest_.cost.front() == 0.0) rest_.cost = std::span(ones_).subspan(dealt);
      const PaddedCover cover = detail::cover_items(rest_);
      exact = exact && (dealt > 0 || cover.exact);
      dealt = hand_out(cover, dealt);
    }
    return exact;
  }

  /// The split as users see it.
  [[nodiscard]] ItemSplit split() const {
    ItemSplit split;
    split.items.resize(problem_.devices());
    split.loads.assign(problem_.devices(), 0.0);
    for (std::size_t device = 0; device < problem_.devices(); ++device) {
      if (count_[device] == 0) continue;
      const auto first = problem_.order.begin() + static_cast<std::ptrdiff_t>(begin_[device]);
      split.items[device].assign(first, first + static_cast<std::ptrdiff_t>(count_[device]));
      std::sort(split.items[device].begin(), split.items[device].end());
      const double longest = problem_.cost[begin_[device]];
      split.loads[device] = static_cast<double>(count_[device]) * longest;
      split.makespan_seconds =
          std::max(split.makespan_seconds, padded_seconds(problem_.models[device], count_[device], longest));
    }
    return split;
  }

 private:
  /// The groups up to the last one that is as late as the makespan. Returns how many items are dealt now.
  std::size_t hand_out(const PaddedCover& cover, std::size_t dealt) {
    std::size_t last = 0;
    std::size_t begin = 0;
    for (std::size_t k = 0; k < cover.groups.size(); begin += cover.groups[k++].items) {
      const PaddedGroup& group = cover.groups[k];
      const double longest = group.items > 0 ? rest_.cost[begin] : 0.0;
      if (padded_seconds(rest_.kinds[group.kind].model, group.items, longest) == cover.makespan_seconds) last = k;
    }
    for (std::size_t k = 0; k <= last; ++k) {
      const PaddedGroup& group = cover.groups[k];
      DeviceKind& kind = rest_.kinds[group.kind];
      std::vector<std::size_t>& devices = waiting_[group.kind];
      const std::size_t device = devices[devices.size() - kind.devices--];
      begin_[device] = dealt;
      count_[device] = group.items;
      dealt += group.items;
    }
    return dealt;
  }

  const ItemProblem& problem_;
  PaddedProblem rest_;                             // what is not dealt yet
  std::vector<std::vector<std::size_t>> waiting_;  // per kind its devices; the last ones are without a group
  std::vector<double> ones_;
  std::vector<std::size_t> begin_;  // per device, in descending order of cost
  std::vector<std::size_t> count_;
};

}  // namespace

ItemSplit split_padded(std::span<const double> costs, std::span<const LoadModel> models) {
  const ItemProblem problem = problem_of(costs, models);
  PaddedDealer dealer(problem);
  const bool exact = dealer.deal();
  ItemSplit split = dealer.split();
  // Padding only adds to a sum of costs: what bounds those bounds this.
  split.lower_bound_seconds =
      exact ? split.makespan_seconds : std::min(split.makespan_seconds, detail::lower_bound_of(problem));
  return split;
}

}  // namespace paceline::plan
