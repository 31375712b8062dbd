// SPDX-License-Identifier: Apache-2.0
#include "plan/stages/stage_clock.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/numbers.hpp"

namespace paceline::plan {

bool StageClock::set(const Partition& partition, const BatchSizes& sizes, std::int64_t most_in_flight) {
  const std::size_t stages = partition.stages();
  count_ = sizes.count;
  larger_count_ = sizes.larger_count;
  most_.resize(stages);
  std::int64_t limit = most_in_flight == 0 ? count_ : std::min(count_, most_in_flight);
  for (std::size_t i = 0; i < stages; ++i) {
    const std::size_t from = partition.cuts[i];
    const std::size_t to = partition.end(i, costs_.blocks());
    const std::size_t device = partition.order[i];
    std::int64_t fixed = costs_.fixed_bytes(from, to, sizes.larger);
    if (i + 1 == stages && fixed != kMostInt64) fixed -= costs_.tied_bytes(partition.order[0], device);
    const std::int64_t left = costs_.problem().devices[device].memory_bytes - fixed;
    const std::int64_t each = costs_.flight_bytes(from, to, sizes.larger);
    if (left < each) return false;
    if (each > 0) limit = std::min(limit, left / each);
    most_[i] = limit;
  }
  stage_times(costs_, partition, sizes.larger, larger_);
  stage_times(costs_, partition, sizes.smaller, smaller_);
  bound_ = stage_bound(costs_, partition, sizes);
  return true;
}

// Stage j waits for a backward before its forward that is d_j later, and a later stage i for a forward before its
// backward that is d_i - 1 earlier. So what lies between, from j to i and back, takes d_j - d_i + 1 cycles at most:
//   (d_j - d_i + 1) * cycle >= seconds from the forward of j through that of i and its backward to the end of j's.
std::vector<std::int64_t> StageClock::depths_for(double cycle) const {
  std::vector<std::int64_t> depths(larger_.size(), 1);
  double after = 0.0;  // seconds from the end of a stage's forward to the beginning of its backward
  double most = 0.0;   // of the later stages: what makes the stages before need more
  for (std::size_t i = larger_.size(); i-- > 0;) {
    const double own = larger_[i].forward + larger_[i].backward;
    const double from = after + own;
    const double needed = std::max(most + from, own) / cycle;
    depths[i] = static_cast<std::int64_t>(std::ceil(std::min(needed * (1.0 - kTie), 1e9)));
    const double above = static_cast<double>(depths[i] - 1) * cycle - after;
    most = i + 1 == larger_.size() ? above : std::max(most, above);
    if (i > 0) after = from + larger_[i - 1].send_forward + larger_[i].send_backward;
  }
  return depths;
}

std::vector<std::int64_t> StageClock::steady_depths() const {
  double low = 0.0;
  double high = 0.0;
  for (const StageTimes& times : larger_) {
    const double own = times.forward + times.backward;
    low = std::max(low, own);
    high += own + times.send_forward + times.send_backward;
  }
  const auto fits = [&](const std::vector<std::int64_t>& depths) {
    return std::ranges::equal(depths, most_, std::ranges::less_equal{});
  };
  if (low == 0.0) return std::vector<std::int64_t>(larger_.size(), 1);
  std::vector<std::int64_t> best = depths_for(low);
  if (fits(best)) return best;
  best = depths_for(high);
  while (high - low > 1e-3 * low) {
    const double middle = low + (high - low) / 2.0;
    std::vector<std::int64_t> depths = depths_for(middle);
    if (!fits(depths)) {
      low = middle;
      continue;
    }
    high = middle;
    best = std::move(depths);
  }
  return best;
}

double StageClock::seconds(std::span<const std::int64_t> depths) {
  const std::size_t stages = larger_.size();
  const FlowTimes seconds = times();
  recurrence_.begin(stages, static_cast<std::size_t>(count_));
  actions_ += 2 * count_ * static_cast<std::int64_t>(stages);
  const auto run = [&](std::size_t stage, std::int64_t batch, bool forward) {
    const FlowAction action{.stage = stage, .micro_batch = static_cast<std::size_t>(batch), .forward = forward};
    recurrence_.run(stage, action.micro_batch, forward, seconds.seconds(action), seconds.send(action));
  };
  for (std::size_t stage = 0; stage < stages; ++stage) {
    for (std::int64_t batch = 0; batch < std::min(depths[stage], count_); ++batch) run(stage, batch, true);
  }
  // Backward j of a stage comes after its forward j + depth - 1. The inputs of the forwards of a round are ready, since
  // no stage is deeper than the one before it.
  for (std::int64_t batch = 0; batch < count_; ++batch) {
    for (std::size_t stage = 0; stage < stages && batch > 0; ++stage) {
      const std::int64_t next = batch + depths[stage] - 1;
      if (next < count_) run(stage, next, true);
    }
    for (std::size_t stage = stages; stage-- > 0;) run(stage, batch, false);
  }
  return recurrence_.finish(0);
}

std::int64_t depth_count(const StageClock& clock) {
  // ways[d]: depths of the stages so far, counted from the last but one, whose largest is d.
  const std::vector<std::int64_t>& most = clock.most_depths();
  std::vector<std::int64_t> ways(static_cast<std::size_t>(most[0]) + 1, 0);
  ways[1] = 1;
  for (std::size_t stage = most.size() - 1; stage-- > 0;) {
    for (std::size_t d = 1; d < ways.size(); ++d)
      ways[d] = static_cast<std::int64_t>(d) > most[stage] ? 0 : saturating_add(ways[d], ways[d - 1]);
  }
  return std::accumulate(ways.begin(), ways.end(), std::int64_t{0}, &saturating_add);
}

namespace {

std::int64_t total(const std::vector<std::int64_t>& depths) {
  return std::accumulate(depths.begin(), depths.end(), std::int64_t{0});
}

bool improves(double seconds, const std::vector<std::int64_t>& depths, const Depths& best) {
  if (best.depths.empty() || seconds < best.seconds * (1.0 - kTie)) return true;
  return seconds <= best.seconds * (1.0 + kTie) && total(depths) < total(best.depths);
}

void try_depths(StageClock& clock, std::vector<std::int64_t>& depths, std::size_t stage, Depths& best) {
  if (stage == 0) {
    const double seconds = clock.seconds(depths);
    if (improves(seconds, depths, best)) best = {depths, seconds};
    return;
  }
  for (std::int64_t depth = depths[stage]; depth <= clock.most_depths()[stage - 1]; ++depth) {
    depths[stage - 1] = depth;
    try_depths(clock, depths, stage - 1, best);
  }
}

}  // namespace

Depths best_depths(StageClock& clock) {
  std::vector<std::int64_t> depths(clock.most_depths().size(), 1);
  Depths best;
  try_depths(clock, depths, depths.size() - 1, best);
  return best;
}

// Steps from depth to depth end after so many actions, a few milliseconds. Deep pipelines rarely gain more by them.
constexpr std::int64_t kDepthActions = 4'000'000;

Depths good_depths(StageClock& clock, double promising, std::span<const std::int64_t> hint) {
  const std::vector<std::int64_t>& most = clock.most_depths();
  const std::size_t stages = most.size();
  Depths best;
  const auto offer = [&](std::vector<std::int64_t> depths) {
    depths.back() = 1;
    for (std::size_t i = 0; i < stages; ++i) depths[i] = std::clamp(depths[i], std::int64_t{1}, most[i]);
    for (std::size_t i = stages - 1; i-- > 0;) depths[i] = std::max(depths[i], depths[i + 1]);
    if (depths == best.depths) return;
    const double seconds = clock.seconds(depths);
    if (improves(seconds, depths, best)) best = {std::move(depths), seconds};
  };
  const auto met = [&] { return best.seconds <= clock.bound() * (1.0 + kTie); };
  std::vector<std::int64_t> steady = clock.steady_depths();
  offer(steady);
  if (!met() && hint.size() == stages) offer({hint.begin(), hint.end()});
  for (std::int64_t& depth : steady) depth = 2 * depth - 1;  // what the pipeline needs while it fills and drains
  if (!met()) offer(steady);
  if (!met()) offer(most);
  // A step up or down on one stage: neighbours follow where depths would rise.
  const std::int64_t most_actions = clock.actions() + kDepthActions;
  for (bool improved = best.seconds < promising; improved && stages > 1 && !met();) {
    const double before = best.seconds;
    for (std::size_t i = stages - 1; i-- > 0;) {
      if (clock.actions() > most_actions) return best;
      for (const std::int64_t change : {1, -1, 2, -2, 4, -4}) {
        std::vector<std::int64_t> depths = best.depths;
        depths[i] += change;
        if (change < 0)
          for (std::size_t j = i + 1; j < stages; ++j)
            depths[j] = std::min(depths[j], std::max<std::int64_t>(depths[i], 1));
        offer(std::move(depths));
      }
    }
    improved = best.seconds < before * (1.0 - kTie);
  }
  return best;
}

}  // namespace paceline::plan
