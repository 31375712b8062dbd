// SPDX-License-Identifier: Apache-2.0
#include "padded_cover.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

namespace paceline::plan::detail {
namespace {

// What 12 devices have, no two alike: a plan then takes some ten milliseconds, which a loader hides behind a step.
constexpr std::size_t kMostStates = 4096;
constexpr double kNever = std::numeric_limits<double>::infinity();

using Groups = std::vector<PaddedGroup>;

/// The most of `left` items, all padded to the first, that the device does within these seconds.
std::size_t most_items(const LoadModel& model, double longest, double seconds, std::size_t left) {
  const auto fit = [&](std::size_t items) { return padded_seconds(model, items, longest) <= seconds; };
  if (fit(left)) return left;
  std::size_t low = 0;      // fit
  std::size_t high = left;  // do not
  const auto look_at = [&](double items) {
    // Also false where a division by nothing left no number.
    if (!(items > static_cast<double>(low) && items < static_cast<double>(high))) return;
    const auto count = static_cast<std::size_t>(items);
    (fit(count) ? low : high) = count;
  };
  // The quotient is right but for its rounding, so that its neighbours mostly settle it.
  const double quotient = (seconds - model.fixed_seconds) / model.seconds_per_cost / longest;
  for (const double items : {quotient, quotient + 1.0, quotient - 1.0}) look_at(items);
  while (high - low > 1) {
    const std::size_t middle = low + (high - low) / 2;
    (fit(middle) ? low : high) = middle;
  }
  return low;
}

/// What devices take under one bound on the makespan.
class Bound {
 public:
  Bound(const PaddedProblem& problem, double seconds) : problem_(problem), seconds_(seconds) {}

  /// Items from `begin` on for a device behind which so many others come; none if it must have some and not one fits.
  std::optional<std::size_t> take(std::size_t kind, std::size_t begin, std::size_t others) {
    const std::size_t left = problem_.cost.size() - begin - (problem_.everyone ? others : 0);
    if (left == 0) return 0;
    const LoadModel& model = problem_.kinds[kind].model;
    const double longest = problem_.cost[begin];
    const std::size_t items = most_items(model, longest, seconds_, left);
    if (items < left) next_ = std::min(next_, padded_seconds(model, items + 1, longest));
    return items > 0 || !problem_.everyone ? std::optional(items) : std::nullopt;
  }

  /// The least bound under which anything that was taken would have been more.
  [[nodiscard]] double next() const { return next_; }

 private:
  const PaddedProblem& problem_;
  double seconds_;
  double next_ = kNever;
};

std::size_t devices_of(const PaddedProblem& problem) {
  std::size_t devices = 0;
  for (const DeviceKind& kind : problem.kinds) devices += kind.devices;
  return devices;
}

/// All orders of the devices at once. A state is how many of each kind have had their turn, and what counts of the
/// orders that lead to it is the most items taken: whoever comes next begins at a shorter item.
class AllOrders {
 public:
  explicit AllOrders(const PaddedProblem& problem) : problem_(problem), devices_(devices_of(problem)) {
    for (const DeviceKind& kind : problem.kinds) {
      stride_.push_back(states_);
      states_ *= kind.devices + 1;
      if (states_ > kMostStates) return;
    }
    taken_.resize(states_);
    last_.resize(states_);
  }

  [[nodiscard]] bool too_many() const { return states_ > kMostStates; }

  /// Groups of all items within the bound; empty if there are none.
  Groups groups(Bound& bound) {
    std::fill(taken_.begin(), taken_.end(), kUnreached);
    taken_.front() = 0;
    std::vector<std::size_t> used(problem_.kinds.size(), 0);
    std::size_t turns = 0;
    for (std::size_t state = 0; state < states_; ++state) {
      if (taken_[state] != kUnreached) extend(state, used, devices_ - turns, bound);
      std::size_t kind = 0;
      for (; kind < used.size() && used[kind] == problem_.kinds[kind].devices; ++kind) {
        turns -= used[kind];
        used[kind] = 0;
      }
      if (kind == used.size()) break;
      ++used[kind];
      ++turns;
    }
    return taken_.back() == static_cast<std::int64_t>(problem_.cost.size()) ? path() : Groups{};
  }

 private:
  static constexpr std::int64_t kUnreached = -1;

  void extend(std::size_t state, const std::vector<std::size_t>& used, std::size_t waiting, Bound& bound) {
    const auto begin = static_cast<std::size_t>(taken_[state]);
    for (std::size_t kind = 0; kind < used.size(); ++kind) {
      if (used[kind] == problem_.kinds[kind].devices) continue;
      const std::optional<std::size_t> items = bound.take(kind, begin, waiting - 1);
      if (!items) continue;
      const std::size_t after = state + stride_[kind];
      const auto taken = static_cast<std::int64_t>(begin + *items);
      if (taken <= taken_[after]) continue;
      taken_[after] = taken;
      last_[after] = kind;
    }
  }

  [[nodiscard]] Groups path() const {
    Groups groups;
    for (std::size_t state = states_ - 1; state > 0;) {
      const std::size_t before = state - stride_[last_[state]];
      groups.push_back({last_[state], static_cast<std::size_t>(taken_[state] - taken_[before])});
      state = before;
    }
    std::reverse(groups.begin(), groups.end());
    return groups;
  }

  const PaddedProblem& problem_;
  std::size_t devices_;
  std::size_t states_ = 1;
  std::vector<std::size_t> stride_;  // per kind, what one more of it adds to the state
  std::vector<std::int64_t> taken_;  // per state
  std::vector<std::size_t> last_;    // per state, the kind whose turn led to it
};

/// One order of the devices.
class OneOrder {
 public:
  OneOrder(const PaddedProblem& problem, bool fastest_first) : items_(problem.cost.size()) {
    for (std::size_t kind = 0; kind < problem.kinds.size(); ++kind) {
      kinds_.insert(kinds_.end(), problem.kinds[kind].devices, kind);
    }
    if (!fastest_first) std::reverse(kinds_.begin(), kinds_.end());
  }

  [[nodiscard]] Groups groups(Bound& bound) const {
    Groups groups;
    std::size_t taken = 0;
    for (std::size_t turn = 0; turn < kinds_.size(); ++turn) {
      const std::optional<std::size_t> items = bound.take(kinds_[turn], taken, kinds_.size() - turn - 1);
      if (!items) return {};
      taken += *items;
      groups.push_back({kinds_[turn], *items});
    }
    return taken == items_ ? groups : Groups{};
  }

 private:
  std::vector<std::size_t> kinds_;
  std::size_t items_;
};

double makespan_of(const PaddedProblem& problem, const Groups& groups) {
  double latest = 0.0;
  std::size_t begin = 0;
  for (const PaddedGroup& group : groups) {
    if (group.items == 0) continue;
    latest = std::max(latest, padded_seconds(problem.kinds[group.kind].model, group.items, problem.cost[begin]));
    begin += group.items;
  }
  return latest;
}

// Bits of doubles that are not negative are ordered as the doubles are: at most 64 halvings whatever the numbers.
double between(double low, double high) {
  const auto from = std::bit_cast<std::uint64_t>(low + 0.0);  // + 0.0: no negative zero
  return std::bit_cast<double>(from + (std::bit_cast<std::uint64_t>(high) - from) / 2);
}

template <class Orders>
PaddedCover least(const PaddedProblem& problem, Orders&& orders) {
  double low = kNever;  // no device can do less with the longest item
  double all = 0.0;     // whatever order, every device takes what is left to it
  for (const DeviceKind& kind : problem.kinds) {
    if (kind.devices == 0) continue;
    low = std::min(low, padded_seconds(kind.model, 1, problem.cost.front()));
    all = std::max(all, padded_seconds(kind.model, problem.cost.size(), problem.cost.front()));
  }
  PaddedCover best;
  const auto improve = [&](Bound bound) {
    Groups groups = orders.groups(bound);
    if (groups.empty()) {
      low = bound.next();
      return;
    }
    best.groups = std::move(groups);
    best.makespan_seconds = makespan_of(problem, best.groups);
  };
  improve({problem, all});
  while (low < best.makespan_seconds) improve({problem, between(low, best.makespan_seconds)});
  return best;
}

}  // namespace

PaddedCover cover_items(const PaddedProblem& problem) {
  AllOrders orders(problem);
  if (!orders.too_many()) {
    PaddedCover cover = least(problem, orders);
    cover.exact = true;
    return cover;
  }
  PaddedCover fastest = least(problem, OneOrder(problem, true));
  PaddedCover slowest = least(problem, OneOrder(problem, false));
  return slowest.makespan_seconds < fastest.makespan_seconds ? slowest : fastest;
}

}  // namespace paceline::plan::detail
