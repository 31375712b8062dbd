// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/padded_items.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "plan/batch/monotone.hpp"
#include "plan/items/item_problem.hpp"
#include "plan/numbers.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

// The number of states of 12 different devices. A plan then takes some ten milliseconds, which a loader hides behind a
// step.
constexpr double kMostStates = 4096.5;  // the count of them may be rounded

/// The devices with the same model, the last index first.
struct DeviceKind {
  LoadModel model;
  std::vector<std::size_t> devices;
};

struct PaddedGroup {
  std::size_t kind = 0;
  std::int64_t items = 0;
};

/// The seconds of a device whose items are padded to the longest; 0 without items. They never fall with more or longer
/// items, not even by rounding.
double padded_seconds(const LoadModel& model, std::int64_t items, double longest) {
  return items == 0 ? 0.0 : model.seconds(static_cast<double>(items) * longest);
}

/// How many of `left` items, all padded to the first, the device can do within these seconds.
std::int64_t most_items(const LoadModel& model, double longest, double seconds, std::int64_t left) {
  const auto fits = [&](std::int64_t items) { return padded_seconds(model, items, longest) <= seconds; };
  if (left == 0 || fits(left)) return left;
  const double guess = (seconds - model.fixed_seconds) / model.seconds_per_cost / longest;
  return last_that_fits(0, left, to_count(guess, left), fits);
}

/// Searches all orders of the devices at once. A state is how many devices of each kind have their group. Of the orders
/// that lead to a state, the one that has taken most items counts, because the next device then begins at a shorter
/// item.
class Orders {
 public:
  Orders(std::span<const double> cost, const std::vector<DeviceKind>& kinds, bool everyone)
      : cost_(cost), kinds_(kinds), everyone_(everyone) {
    std::size_t states = 1;
    for (const DeviceKind& kind : kinds) {
      stride_.push_back(states);
      states *= kind.devices.size() + 1;
      devices_ += std::ssize(kind.devices);
    }
    taken_.resize(states);
    last_.resize(states);
  }

  /// Groups of all items, the costliest first, with the least makespan.
  std::vector<PaddedGroup> least() {
    double low = kInfinity;  // the fastest device with the longest item alone
    double high = 0.0;       // in any order every device takes what is left for it
    for (const DeviceKind& kind : kinds_) {
      low = std::min(low, padded_seconds(kind.model, 1, cost_.front()));
      high = std::max(high, padded_seconds(kind.model, std::ssize(cost_), cost_.front()));
    }
    std::vector<PaddedGroup> best;
    double makespan = kInfinity;
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
    return std::bit_cast<double>(std::midpoint(from, std::bit_cast<std::uint64_t>(high)));
  }

  [[nodiscard]] std::size_t used(std::size_t state, std::size_t kind) const {
    return state / stride_[kind] % (kinds_[kind].devices.size() + 1);
  }

  /// Whether devices can take all items within these seconds. Sets next_, the least bound under which more is taken.
  bool take(double seconds) {
    std::ranges::fill(taken_, kUnreached);
    taken_.front() = 0;
    next_ = kInfinity;
    for (std::size_t state = 0; state + 1 < taken_.size(); ++state) {
      if (taken_[state] == kUnreached) continue;
      const double longest = cost_[std::min<std::size_t>(static_cast<std::size_t>(taken_[state]), cost_.size() - 1)];
      std::int64_t left = std::ssize(cost_) - taken_[state];
      if (everyone_) {
        left -= devices_ - 1;
        for (std::size_t kind = 0; kind < kinds_.size(); ++kind) left += static_cast<std::int64_t>(used(state, kind));
      }
      for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
        if (used(state, kind) == kinds_[kind].devices.size()) continue;
        const LoadModel& model = kinds_[kind].model;
        const std::int64_t items = most_items(model, longest, seconds, left);
        if (items < left) next_ = std::min(next_, padded_seconds(model, items + 1, longest));
        if (items == 0 && everyone_) continue;
        const std::size_t after = state + stride_[kind];
        if (taken_[state] + items <= taken_[after]) continue;
        taken_[after] = taken_[state] + items;
        last_[after] = kind;
      }
    }
    return taken_.back() == std::ssize(cost_);
  }

  [[nodiscard]] std::vector<PaddedGroup> path(double& makespan) const {
    std::vector<PaddedGroup> groups;
    makespan = 0.0;
    for (std::size_t state = taken_.size() - 1; state > 0; state -= stride_[last_[state]]) {
      const std::size_t kind = last_[state];
      const std::int64_t begin = taken_[state - stride_[kind]];
      const std::int64_t items = groups.emplace_back(PaddedGroup{kind, taken_[state] - begin}).items;
      if (items == 0) continue;
      makespan = std::max(makespan, padded_seconds(kinds_[kind].model, items, cost_[static_cast<std::size_t>(begin)]));
    }
    std::ranges::reverse(groups);
    return groups;
  }

  static constexpr std::int64_t kUnreached = -1;

  std::span<const double> cost_;  // descending
  const std::vector<DeviceKind>& kinds_;
  bool everyone_;  // every device gets items; there are enough
  std::int64_t devices_ = 0;
  std::vector<std::size_t> stride_;  // per kind, what one more of it adds to the state
  std::vector<std::int64_t> taken_;  // per state
  std::vector<std::size_t> last_;    // per state, the kind whose turn led to it
  double next_ = kInfinity;
};

/// Sorts the kinds, the fastest first. Returns true if no two different kinds had to count as one.
bool kinds_of(std::span<const LoadModel> models, std::vector<DeviceKind>& kinds) {
  std::map<std::pair<double, double>, std::vector<std::size_t>> devices;
  for (std::size_t d = models.size(); d-- > 0;) {
    devices[{models[d].seconds_per_cost, models[d].fixed_seconds}].push_back(d);
  }
  // The logarithm of their number, which may be larger than any double.
  double states = 0.0;
  const auto choices = [](const std::vector<std::size_t>& same) {
    return std::log(static_cast<double>(same.size() + 1));
  };
  for (auto& [pace, same] : devices) {
    states += choices(same);
    kinds.push_back({{pace.second, pace.first}, std::move(same)});
  }
  while (kinds.size() > 1 && states > std::log(kMostStates)) {
    // The two neighbours that differ least become one kind with the slower model.
    const auto ratio = [](const DeviceKind& a, const DeviceKind& b) {
      return b.model.seconds_per_cost / a.model.seconds_per_cost;
    };
    auto nearest = kinds.begin();
    for (auto kind = kinds.begin(); kind + 1 != kinds.end(); ++kind) {
      if (ratio(kind[0], kind[1]) < ratio(nearest[0], nearest[1])) nearest = kind;
    }
    DeviceKind& faster = nearest[0];
    DeviceKind& slower = nearest[1];
    states -= choices(faster.devices) + choices(slower.devices);
    slower.model.fixed_seconds = std::max(slower.model.fixed_seconds, faster.model.fixed_seconds);
    slower.devices.insert(slower.devices.end(), faster.devices.begin(), faster.devices.end());
    states += choices(slower.devices);
    kinds.erase(nearest);
  }
  return kinds.size() == devices.size();
}

}  // namespace

ItemSplit split_padded(std::span<const double> costs, std::span<const LoadModel> models) {
  const ItemProblem problem = item_problem(costs, models);
  for (std::size_t device = 0; device < models.size() && !costs.empty(); ++device) {
    if (std::isfinite(padded_seconds(models[device], std::ssize(costs), problem.cost.front()))) continue;
    refuse(
        "device {} would need more seconds than a double holds for all items, padded to the longest; check the units",
        device);
  }
  std::vector<DeviceKind> kinds;
  const bool exact = kinds_of(models, kinds);
  ItemSplit split;
  split.items.resize(models.size());
  split.loads.assign(models.size(), 0.0);
  if (costs.empty()) return split;
  auto next = problem.order.begin();
  for (const auto& [kind, items] : Orders(problem.cost, kinds, costs.size() >= models.size()).least()) {
    const std::size_t device = kinds[kind].devices.back();
    kinds[kind].devices.pop_back();
    if (items == 0) continue;
    const double longest = costs[*next];
    split.items[device].assign(next, next + items);
    std::ranges::sort(split.items[device]);
    split.loads[device] = static_cast<double>(items) * longest;
    split.makespan_seconds = std::max(split.makespan_seconds, padded_seconds(models[device], items, longest));
    next += items;
  }
  // Padding only adds to the sum of costs, so a bound for sums is a bound here, too.
  split.lower_bound_seconds =
      exact ? split.makespan_seconds : std::min(split.makespan_seconds, lower_bound_of(problem));
  return split;
}

}  // namespace paceline::plan
