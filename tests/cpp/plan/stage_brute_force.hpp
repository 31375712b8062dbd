// SPDX-License-Identifier: Apache-2.0
#pragma once

// The contract of plan_stages and of the recurrence written a second time, as plainly as possible: add up blocks one by
// one, let time pass action by action, try everything.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include <paceline/plan/stages.hpp>

#include "draws.hpp"

namespace paceline::plan::testing {

/// Times of one stage for each micro-batch.
using BatchTimes = std::vector<std::vector<StageTimes>>;

/// When the last action ends. Again and again, the action that can start first starts.
inline double simulate(const Schedule& schedule, const BatchTimes& times) {
  const std::size_t stages = schedule.stages.size();
  const double never = std::numeric_limits<double>::infinity();
  const auto count = static_cast<std::size_t>(schedule.micro_batches);
  std::vector<std::vector<double>> output(stages, std::vector<double>(count, never));    // at the next stage
  std::vector<std::vector<double>> gradient(stages, std::vector<double>(count, never));  // at the stage before
  std::vector<double> free(stages, 0.0);
  std::vector<std::size_t> next(stages, 0);
  double end = 0.0;
  for (;;) {
    std::size_t first = stages;
    double earliest = never;
    for (std::size_t i = 0; i < stages; ++i) {
      if (next[i] == schedule.stages[i].size()) continue;
      const Action action = schedule.stages[i][next[i]];
      const auto batch = static_cast<std::size_t>(action.micro_batch);
      double start = free[i];
      if (action.kind == Action::Kind::forward && i > 0) start = std::max(start, output[i - 1][batch]);
      if (action.kind == Action::Kind::backward && i + 1 < stages) start = std::max(start, gradient[i + 1][batch]);
      if (start < earliest) {
        earliest = start;
        first = i;
      }
    }
    if (first == stages) return end;
    const Action action = schedule.stages[first][next[first]++];
    const auto batch = static_cast<std::size_t>(action.micro_batch);
    const StageTimes& takes = times[batch][first];
    if (action.kind == Action::Kind::forward) {
      free[first] = earliest + takes.forward;
      output[first][batch] = free[first] + takes.send_forward;
    } else {
      free[first] = earliest + takes.backward;
      gradient[first][batch] = free[first] + takes.send_backward;
    }
    end = std::max(end, free[first]);
  }
}

inline BatchTimes times_of(const StageProblem& problem, const std::vector<std::size_t>& cuts,
                           const std::vector<std::size_t>& order, std::int64_t micro_batches) {
  BatchTimes times;
  for (std::int64_t batch = 0; batch < micro_batches; ++batch) {
    const std::int64_t size = problem.batch_size / micro_batches + (batch < problem.batch_size % micro_batches ? 1 : 0);
    const auto items = static_cast<double>(size);
    std::vector<StageTimes>& stages = times.emplace_back(cuts.size());
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      const StageDevice& device = problem.devices[order[i]];
      const std::size_t to = i + 1 < cuts.size() ? cuts[i + 1] : problem.blocks.size();
      for (std::size_t block = cuts[i]; block < to; ++block) {
        const BlockCost& cost = problem.blocks[block];
        stages[i].forward += (cost.forward_fixed + cost.forward_per_item * items) / device.speed;
        stages[i].backward += (cost.backward_fixed + cost.backward_per_item * items) / device.speed;
      }
      if (i == 0 || device.memory_space == problem.devices[order[i - 1]].memory_space) continue;
      const double bytes = static_cast<double>(problem.blocks[cuts[i]].boundary_bytes_per_item) * items;
      const LinkCost& link = problem.link;
      const double send = link.latency_seconds + (link.bytes_per_second > 0 ? bytes / link.bytes_per_second : 0.0);
      stages[i - 1].send_forward = send;
      stages[i].send_backward = send;
    }
  }
  return times;
}

inline std::int64_t bytes_of(const StageProblem& problem, const std::vector<std::size_t>& cuts,
                             const std::vector<std::size_t>& order, std::int64_t micro_batches, std::size_t stage,
                             std::int64_t in_flight) {
  const std::size_t to = stage + 1 < cuts.size() ? cuts[stage + 1] : problem.blocks.size();
  const std::int64_t items = (problem.batch_size + micro_batches - 1) / micro_batches;
  std::int64_t bytes = 0;
  std::int64_t workspace = 0;
  for (std::size_t block = cuts[stage]; block < to; ++block) {
    bytes += problem.blocks[block].parameter_bytes + in_flight * items * problem.blocks[block].saved_bytes_per_item;
    workspace = std::max(workspace, items * problem.blocks[block].workspace_bytes_per_item);
  }
  if (stage > 0) bytes += in_flight * items * problem.blocks[cuts[stage]].boundary_bytes_per_item;
  const bool shared = problem.devices[order.front()].memory_space == problem.devices[order.back()].memory_space &&
                      problem.blocks.size() > 1;
  if (stage + 1 == cuts.size() && shared) bytes -= problem.tied_bytes;
  return bytes + workspace;
}

/// Calls visit(cuts, order, micro-batches, depths) for everything that fits.
template <class Visit>
void every_plan(const StageProblem& problem, std::int64_t least, std::int64_t most, const Visit& visit) {
  std::vector<std::size_t> cuts;
  std::vector<std::size_t> order;
  std::vector<std::int64_t> depths;
  std::int64_t count = 0;
  const std::function<void()> deepen = [&] {
    const std::size_t stage = depths.size();
    if (stage == cuts.size()) {
      visit(cuts, order, count, depths);
      return;
    }
    for (std::int64_t depth = 1; depth <= (stage == 0 ? count : depths.back()); ++depth) {
      if (bytes_of(problem, cuts, order, count, stage, depth) > problem.devices[order[stage]].memory_bytes) break;
      depths.push_back(depth);
      deepen();
      depths.pop_back();
    }
  };
  const std::function<void(std::size_t)> place = [&](std::size_t from) {
    for (std::size_t device = 0; device < problem.devices.size(); ++device) {
      if (std::ranges::count(order, device) > 0) continue;
      order.push_back(device);
      cuts.push_back(from);
      for (count = least; count <= most; ++count) deepen();  // this stage takes the blocks that are left
      for (std::size_t to = from + 1; to < problem.blocks.size(); ++to) place(to);
      order.pop_back();
      cuts.pop_back();
    }
  };
  place(0);
}

/// Small numbers, so that ties are common, or any, so that rounding occurs; caps that often bind.
class StageCases : public Draws {
 public:
  using Draws::Draws;

  StageProblem next(std::int64_t most_devices, std::int64_t most_blocks, std::int64_t most_items) {
    StageProblem problem;
    const bool coarse = chance(0.5);
    const bool fixed = chance(0.5);
    const auto seconds = [&] { return coarse ? static_cast<double>(integer(1, 3)) : real(0.1, 3.0); };
    const auto blocks = integer(1, most_blocks);
    for (std::int64_t i = 0; i < blocks; ++i) {
      problem.blocks.push_back({.forward_fixed = fixed ? seconds() / 4 : 0.0,
                                .forward_per_item = seconds(),
                                .backward_fixed = fixed ? seconds() / 4 : 0.0,
                                .backward_per_item = 2 * seconds(),
                                .parameter_bytes = integer(0, 12),
                                .saved_bytes_per_item = integer(0, 3),
                                .boundary_bytes_per_item = integer(0, 2),
                                .workspace_bytes_per_item = integer(0, 2)});
    }
    const bool capped = chance(0.6);
    const auto devices = integer(1, most_devices);
    for (std::int64_t i = 0; i < devices; ++i) {
      problem.devices.push_back({.speed = coarse ? static_cast<double>(integer(1, 3)) : real(0.5, 3.0),
                                 .memory_bytes = capped ? integer(4, 40) : StageDevice::kUnlimitedBytes,
                                 .memory_space = static_cast<std::size_t>(integer(0, 2))});
    }
    problem.batch_size = integer(1, most_items);
    if (chance(0.5)) problem.link = {.latency_seconds = real(0.0, 0.3), .bytes_per_second = chance(0.5) ? 2.0 : 0.0};
    if (chance(0.3))
      problem.tied_bytes = std::min(problem.blocks.front().parameter_bytes, problem.blocks.back().parameter_bytes);
    return problem;
  }
};

}  // namespace paceline::plan::testing
