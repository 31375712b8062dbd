// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/padded_items.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include <paceline/error.hpp>

#include "plan/batch/monotone.hpp"
#include "plan/items/item_problem.hpp"

namespace paceline::plan {
namespace {

// The number of states of 12 different devices. A plan then takes some ten milliseconds, which a loader hides behind a
// step.
constexpr std::size_t kMostStates = 4096;
constexpr double kNever = std::numeric_limits<double>::infinity();

/// The devices with the same model that have no group yet. The last one is next.
struct Kind {
  LoadModel model;
  std::vector<std::size_t> devices;
};

struct Group {
  std::size_t kind = 0;
  std::size_t items = 0;
};

/// The seconds of a device whose items are padded to the longest; 0 without items. They never fall with more or longer
/// items, not even by rounding.
double padded_seconds(const LoadModel& model, std::size_t items, double longest) {
  if (items == 0) return 0.0;
  return model.fixed_seconds + model.seconds_per_cost * (static_cast<double>(items) * longest);
}

/// How many of `left` items, all padded to the first, the device can do within these seconds.
std::size_t most_items(const LoadModel& model, double longest, double seconds, std::size_t left) {
  const auto fits = [&](std::int64_t items) {
    return padded_seconds(model, static_cast<std::size_t>(items), longest) <= seconds;
  };
  const auto all = static_cast<std::int64_t>(left);
  if (fits(all)) return left;
  const double guess = (seconds - model.fixed_seconds) / model.seconds_per_cost / longest;
  return static_cast<std::size_t>(last_that_fits(0, all, to_count(guess, all), fits));
}

/// Searches all orders of the devices at once. A state is how many devices of each kind have their group. Of the orders
/// that lead to a state, the one that has taken most items counts, because the next device then begins at a shorter
/// item.
class Orders {
 public:
  Orders(std::span<const double> cost, const std::vector<Kind>& kinds, bool everyone)
      : cost_(cost), kinds_(kinds), everyone_(everyone) {
    std::size_t states = 1;
    for (const Kind& kind : kinds) {
      stride_.push_back(states);
      states *= kind.devices.size() + 1;
      devices_ += kind.devices.size();
    }
    taken_.resize(states);
    last_.resize(states);
  }

  /// Groups of all items, the costliest first, with the least makespan.
  std::vector<Group> least(double& makespan) {
    double low = kNever;  // the fastest device with the longest item alone
    double high = 0.0;    // in any order every device takes what is left for it
    for (const Kind& kind : kinds_) {
      if (kind.devices.empty()) continue;
      low = std::min(low, padded_seconds(kind.model, 1, cost_.front()));
      high = std::max(high, padded_seconds(kind.model, cost_.size(), cost_.front()));
    }
    std::vector<Group> best;
    makespan = kNever;
    for (double bound = high; low < makespan; bound = between(low, makespan)) {
      if (take(bound)) {
        best = path(makespan);
      } else {
        low = next_;
      }
    }
    return best;
  }

 private:
  // The bits of doubles that are not negative are ordered like the doubles, so there are at most 64 halvings.
  static double between(double low, double high) {
    const auto from = std::bit_cast<std::uint64_t>(low + 0.0);  // + 0.0: no negative zero
    return std::bit_cast<double>(from + (std::bit_cast<std::uint64_t>(high) - from) / 2);
  }

  [[nodiscard]] std::size_t used(std::size_t state, std::size_t kind) const {
    return state / stride_[kind] % (kinds_[kind].devices.size() + 1);
  }

  /// Whether devices can take all items within these seconds. Sets next_, the least bound under which more is taken.
  bool take(double seconds) {
    std::fill(taken_.begin(), taken_.end(), kUnreached);
    taken_.front() = 0;
    next_ = kNever;
    for (std::size_t state = 0; state + 1 < taken_.size(); ++state) {
      if (taken_[state] == kUnreached) continue;
      const auto begin = static_cast<std::size_t>(taken_[state]);
      std::size_t others = devices_ - 1;
      for (std::size_t kind = 0; kind < kinds_.size(); ++kind) others -= used(state, kind);
      const std::size_t left = cost_.size() - begin - (everyone_ ? others : 0);
      for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
        if (used(state, kind) == kinds_[kind].devices.size()) continue;
        const LoadModel& model = kinds_[kind].model;
        const std::size_t items = left == 0 ? 0 : most_items(model, cost_[begin], seconds, left);
        if (items < left) next_ = std::min(next_, padded_seconds(model, items + 1, cost_[begin]));
        if (items == 0 && everyone_) continue;
        const std::size_t after = state + stride_[kind];
        const auto taken = static_cast<std::int64_t>(begin + items);
        if (taken <= taken_[after]) continue;
        taken_[after] = taken;
        last_[after] = kind;
      }
    }
    return taken_.back() == static_cast<std::int64_t>(cost_.size());
  }

  [[nodiscard]] std::vector<Group> path(double& makespan) const {
    std::vector<Group> groups;
    makespan = 0.0;
    for (std::size_t state = taken_.size() - 1; state > 0;) {
      const std::size_t before = state - stride_[last_[state]];
      const auto begin = static_cast<std::size_t>(taken_[before]);
      const auto items = static_cast<std::size_t>(taken_[state]) - begin;
      groups.push_back({last_[state], items});
      if (items > 0) makespan = std::max(makespan, padded_seconds(kinds_[last_[state]].model, items, cost_[begin]));
      state = before;
    }
    std::reverse(groups.begin(), groups.end());
    return groups;
  }

  static constexpr std::int64_t kUnreached = -1;

  std::span<const double> cost_;  // descending
  const std::vector<Kind>& kinds_;
  bool everyone_;  // every device gets items; there are enough
  std::size_t devices_ = 0;
  std::vector<std::size_t> stride_;  // per kind, what one more of it adds to the state
  std::vector<std::int64_t> taken_;  // per state
  std::vector<std::size_t> last_;    // per state, the kind whose turn led to it
  double next_ = kNever;
};

/// Sorts the kinds, the fastest first. Returns true if no two different kinds had to count as one.
bool kinds_of(const ItemProblem& problem, std::vector<Kind>& kinds) {
  std::vector<std::size_t> devices(problem.devices());
  std::iota(devices.begin(), devices.end(), std::size_t{0});
  const auto pace = [&](std::size_t device) {
    const LoadModel& model = problem.models[device];
    return std::pair{model.seconds_per_cost, model.fixed_seconds};
  };
  // Groups are taken from the back, so equal devices are in descending order.
  std::sort(devices.begin(), devices.end(),
            [&](auto a, auto b) { return pace(a) != pace(b) ? pace(a) < pace(b) : a > b; });
  for (const std::size_t device : devices) {
    const LoadModel& model = problem.models[device];
    if (kinds.empty() || kinds.back().model != model) kinds.push_back({model, {}});
    kinds.back().devices.push_back(device);
  }
  const auto states = [&] {
    double product = 1.0;
    for (const Kind& kind : kinds) product *= static_cast<double>(kind.devices.size() + 1);
    return product;
  };
  const std::size_t different = kinds.size();
  while (kinds.size() > 1 && states() > static_cast<double>(kMostStates)) {
    // The two neighbours that differ least become one kind with the slower model.
    std::size_t nearest = 0;
    double least = kNever;
    for (std::size_t k = 0; k + 1 < kinds.size(); ++k) {
      const double ratio = kinds[k + 1].model.seconds_per_cost / kinds[k].model.seconds_per_cost;
      if (!(ratio < least)) continue;
      least = ratio;
      nearest = k;
    }
    Kind& slower = kinds[nearest + 1];
    const Kind& faster = kinds[nearest];
    slower.model.fixed_seconds = std::max(slower.model.fixed_seconds, faster.model.fixed_seconds);
    slower.devices.insert(slower.devices.end(), faster.devices.begin(), faster.devices.end());
    kinds.erase(kinds.begin() + static_cast<std::ptrdiff_t>(nearest));
  }
  return kinds.size() == different;
}

}  // namespace

ItemSplit split_padded(std::span<const double> costs, std::span<const LoadModel> models) {
  const ItemProblem problem = item_problem(costs, models);
  for (std::size_t device = 0; device < models.size() && !costs.empty(); ++device) {
    if (std::isfinite(padded_seconds(models[device], costs.size(), problem.cost.front()))) continue;
    throw InvalidArgument(fmt::format(
        "device {} would need more seconds than a double holds for all items, padded to the longest; check the units",
        device));
  }
  std::vector<Kind> kinds;
  const bool exact = kinds_of(problem, kinds);
  ItemSplit split;
  split.items.resize(models.size());
  split.loads.assign(models.size(), 0.0);
  for (std::size_t dealt = 0; dealt < costs.size();) {
    const std::span<const double> rest = std::span(problem.cost).subspan(dealt);
    double makespan = 0.0;
    const std::vector<Group> groups = Orders(rest, kinds, costs.size() >= models.size()).least(makespan);
    // The items after the last group that is as late as the makespan are split anew.
    std::size_t last = 0;
    for (std::size_t k = 0, begin = 0; k < groups.size(); begin += groups[k++].items) {
      const LoadModel& model = kinds[groups[k].kind].model;
      if (groups[k].items > 0 && padded_seconds(model, groups[k].items, rest[begin]) == makespan) last = k;
    }
    for (std::size_t k = 0; k <= last; ++k) {
      std::vector<std::size_t>& devices = kinds[groups[k].kind].devices;
      const std::size_t device = devices.back();
      devices.pop_back();
      const auto first = problem.order.begin() + static_cast<std::ptrdiff_t>(dealt);
      split.items[device].assign(first, first + static_cast<std::ptrdiff_t>(groups[k].items));
      std::sort(split.items[device].begin(), split.items[device].end());
      if (groups[k].items == 0) continue;
      split.loads[device] = static_cast<double>(groups[k].items) * problem.cost[dealt];
      split.makespan_seconds =
          std::max(split.makespan_seconds, padded_seconds(models[device], groups[k].items, problem.cost[dealt]));
      dealt += groups[k].items;
    }
  }
  // Padding only adds to the sum of costs, so a bound for sums is a bound here, too.
  split.lower_bound_seconds =
      exact ? split.makespan_seconds : std::min(split.makespan_seconds, lower_bound_of(problem));
  return split;
}

}  // namespace paceline::plan
