// SPDX-License-Identifier: Apache-2.0
#include "plan/stages/subset_program.hpp"

#include <algorithm>

#include "plan/batch/monotone.hpp"
#include "plan/numbers.hpp"

namespace paceline::plan {

std::optional<Partition> SubsetProgram::find(const PartitionGoal& goal, bool exact) {
  if (costs_.problem().tied_bytes == 0 || costs_.blocks() == 1) return find_from(goal, exact, Reach::kNone);
  // What the last stage must hold depends on where the first one is.
  std::optional<Partition> found;
  for (std::size_t group = 0; group < sets_.classes() && !found; ++group)
    found = find_from(goal, exact, sets_.next_device(0, group));
  return found;
}

std::optional<Partition> SubsetProgram::find_from(const PartitionGoal& goal, bool exact, std::size_t first) {
  const std::size_t blocks = costs_.blocks();
  width_ = exact ? blocks + 1 : 1;
  reached_.assign(sets_.count() * width_, {});
  extend(goal, exact, first, 0, {});
  for (std::size_t set = 1; set < sets_.count(); ++set) {
    const std::size_t stages = sets_.used(set);
    const Reach& last = reached_[set * width_ + width_ - 1];
    const bool complete = last.group != Reach::kNone && last.block == blocks;
    const bool enough = goal.depth.stages != 0    ? stages == goal.depth.stages
                        : !options_.order.empty() ? stages == options_.order.size()
                                                  : true;
    if (complete && enough) return trace(set, exact);
    if (goal.depth.stages != 0 && stages >= goal.depth.stages) continue;
    for (std::size_t i = 0; i < width_; ++i) {
      const Reach reach = reached_[set * width_ + i];
      if (reach.group != Reach::kNone && reach.block < blocks) extend(goal, exact, first, set, reach);
    }
  }
  return std::nullopt;
}

void SubsetProgram::extend(const PartitionGoal& goal, bool exact, std::size_t first, std::size_t set,
                           const Reach& reach) {
  const std::size_t blocks = costs_.blocks();
  const std::size_t stage = sets_.used(set);
  const std::size_t from = reach.block;
  const std::int64_t depth = goal.depth.depth(stage);
  // Each stage that must follow needs a block.
  const std::size_t stages = goal.depth.stages != 0 ? goal.depth.stages : options_.order.size();
  const std::size_t left = stages > stage ? stages - stage - 1 : 0;
  if (from + left >= blocks) return;
  if (!options_.cuts.empty() && stage >= options_.cuts.size()) return;
  // The depth is also that of the next stage.
  const bool shares = goal.depth.alike > 1 && stage + 1 < goal.depth.stages && !goal.depth.begins_alike(stage + 1);
  const bool given = !options_.cuts.empty();
  const std::size_t given_end = stage + 1 < options_.cuts.size() ? options_.cuts[stage + 1] : blocks;
  const auto first_size = static_cast<double>(goal.sizes.larger);
  const std::int64_t last_items = goal.sizes.larger_count == goal.sizes.count ? goal.sizes.larger : goal.sizes.smaller;
  const auto last_size = static_cast<double>(last_items);
  const auto items = static_cast<double>(costs_.problem().batch_size);
  const auto runs = static_cast<double>(goal.sizes.count);
  for (std::size_t group = 0; group < sets_.classes(); ++group) {
    if (!sets_.has_more(set, group)) continue;
    const std::size_t device = sets_.next_device(set, group);
    if (stage == 0 && first != Reach::kNone && device != first) continue;
    double around = reach.around;
    if (stage > 0) {
      const std::size_t source = device_of(set, reach);
      around += costs_.send(from, source, device, goal.sizes.larger) + costs_.send(from, source, device, last_items);
    }
    const std::int64_t memory = saturating_add(costs_.problem().devices[device].memory_bytes, goal.extra_bytes);
    const auto fits = [&](std::size_t to) {
      if (costs_.work(from, to, device, items, runs) + reach.turns + around > goal.seconds) return false;
      const std::int64_t flying = saturating_multiply(depth, costs_.flight_bytes(from, to, goal.sizes.larger));
      std::int64_t bytes = saturating_add(costs_.fixed_bytes(from, to, goal.sizes.larger), flying);
      if (to == blocks && first != Reach::kNone && bytes != kMostInt64)
        bytes -= costs_.tied_bytes(stage == 0 ? device : first, device);
      return bytes <= memory;
    };
    const auto reaches = [&](std::size_t to) {
      const double there =
          around + costs_.forward(from, to, device, first_size) + costs_.backward(from, to, device, last_size);
      const std::size_t next = sets_.with(set, group);
      Reach& now = reached_[next * width_ + (exact ? to : 0)];
      if (now.group == Reach::kNone || to > now.block || (to == now.block && there < now.around))
        now = {to, there, shares ? reach.turns + costs_.work(from, to, device, items, runs) : 0.0, group, from};
    };
    // Without the last block, both time and bytes grow with every further block; the last one may share parameters.
    if (given) {
      if (fits(given_end)) reaches(given_end);
      continue;
    }
    if (left == 0 && fits(blocks)) {
      reaches(blocks);
      if (!exact) continue;
    }
    const std::size_t last = last_that_fits(from, left == 0 ? blocks : blocks - left + 1, fits);
    for (std::size_t to = exact ? from + 1 : last; to > from && to <= last; ++to) reaches(to);
  }
}

Partition SubsetProgram::trace(std::size_t set, bool exact) const {
  Partition partition;
  std::size_t block = costs_.blocks();
  while (block > 0) {
    const Reach& reach = reached_[set * width_ + (exact ? block : 0)];
    partition.cuts.push_back(reach.from);
    partition.order.push_back(device_of(set, reach));
    set = sets_.without(set, reach.group);
    block = reach.from;
  }
  std::ranges::reverse(partition.cuts);
  std::ranges::reverse(partition.order);
  return partition;
}

}  // namespace paceline::plan
