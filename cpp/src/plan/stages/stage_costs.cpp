// SPDX-License-Identifier: Apache-2.0
#include "plan/stages/stage_costs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include <paceline/error.hpp>

#include "plan/numbers.hpp"
#include "plan/stages/dataflow.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

template <class Number>
void check_number(Number value, const char* owner, std::size_t index, const char* name, bool positive = false) {
  const bool finite = std::isfinite(static_cast<double>(value));
  if (finite && (positive ? value > Number{0} : value >= Number{0})) return;
  refuse("{} {}: {} is {}; it must be finite and {}", owner, index, name, value,
         positive ? "above zero" : "not negative");
}

void check_problem(const StageProblem& problem) {
  if (problem.blocks.empty()) refuse("a model needs at least one block");
  if (problem.devices.empty()) refuse("a pipeline needs at least one device");
  if (problem.batch_size < 1) refuse("batch_size is {}; a batch has at least one item", problem.batch_size);
  for (std::size_t i = 0; i < problem.blocks.size(); ++i) {
    const BlockCost& block = problem.blocks[i];
    check_number(block.forward_fixed, "block", i, "forward_fixed");
    check_number(block.forward_per_item, "block", i, "forward_per_item");
    check_number(block.backward_fixed, "block", i, "backward_fixed");
    check_number(block.backward_per_item, "block", i, "backward_per_item");
    check_number(block.parameter_bytes, "block", i, "parameter_bytes");
    check_number(block.saved_bytes_per_item, "block", i, "saved_bytes_per_item");
    check_number(block.boundary_bytes_per_item, "block", i, "boundary_bytes_per_item");
    check_number(block.workspace_bytes_per_item, "block", i, "workspace_bytes_per_item");
  }
  for (std::size_t i = 0; i < problem.devices.size(); ++i) {
    check_number(problem.devices[i].speed, "device", i, "speed", true);
    check_number(problem.devices[i].noise, "device", i, "noise");
    check_number(problem.devices[i].memory_bytes, "device", i, "memory_bytes");
  }
  const auto wrong = [](double value) { return !(value >= 0.0) || !std::isfinite(value); };
  if (wrong(problem.link.latency_seconds) || wrong(problem.link.bytes_per_second))
    refuse(
        "the link has a latency of {} s and {} bytes/s; both must be finite and not "
        "negative",
        problem.link.latency_seconds, problem.link.bytes_per_second);
  const std::int64_t least = std::min(problem.blocks.front().parameter_bytes, problem.blocks.back().parameter_bytes);
  if (problem.tied_bytes < 0 || problem.tied_bytes > least)
    refuse(
        "tied_bytes is {}; the first and the last block share between 0 and {} bytes, "
        "which the parameter_bytes of both include",
        problem.tied_bytes, least);
}

}  // namespace

std::string device_name(const StageProblem& problem, std::size_t device) {
  const std::string& name = problem.devices[device].name;
  return name.empty() ? fmt::format("device {}", device) : name;
}

BatchSizes::BatchSizes(std::int64_t batch_size, std::int64_t micro_batches)
    : count(micro_batches),
      larger((batch_size - 1) / micro_batches + 1),
      larger_count(batch_size % micro_batches != 0 ? batch_size % micro_batches : micro_batches),
      smaller(batch_size / micro_batches) {}

StageCosts::StageCosts(const StageProblem& problem) : problem_(problem) {
  check_problem(problem_);
  const std::size_t count = blocks();
  const auto alike = [&](const StageDevice& a, const StageDevice& b) {
    const auto together = [&](const StageDevice& device) {
      return std::ranges::count(problem_.devices, device.memory_space, &StageDevice::memory_space) > 1;
    };
    return a.speed == b.speed && a.noise == b.noise && a.memory_bytes == b.memory_bytes &&
           (a.memory_space == b.memory_space || (!together(a) && !together(b)));
  };
  for (const StageDevice& device : problem_.devices) {
    const auto first =
        std::ranges::find_if(problem_.devices, [&](const StageDevice& other) { return alike(other, device); });
    classes_.push_back(static_cast<std::size_t>(first - problem_.devices.begin()));
  }
  for (auto* sums : {&forward_, &backward_, &both_}) sums->emplace_back();
  parameters_.push_back(0);
  saved_.push_back(0);
  workspace_.emplace_back();
  for (const BlockCost& block : problem_.blocks) {
    forward_.push_back(
        {forward_.back().fixed + block.forward_fixed, forward_.back().per_item + block.forward_per_item});
    backward_.push_back(
        {backward_.back().fixed + block.backward_fixed, backward_.back().per_item + block.backward_per_item});
    both_.push_back(
        {forward_.back().fixed + backward_.back().fixed, forward_.back().per_item + backward_.back().per_item});
    parameters_.push_back(saturating_add(parameters_.back(), block.parameter_bytes));
    saved_.push_back(saturating_add(saved_.back(), block.saved_bytes_per_item));
    workspace_[0].push_back(block.workspace_bytes_per_item);
  }
  // Differences of sums are only right below the limit.
  if (parameters_.back() == kMostInt64 || saved_.back() == kMostInt64)
    refuse("the bytes of all blocks together do not fit 63 bits");
  for (std::size_t width = 1; 2 * width <= count; width *= 2) {
    const std::vector<std::int64_t>& half = workspace_.back();
    std::vector<std::int64_t> whole;
    for (std::size_t i = 0; i + 2 * width <= count; ++i) whole.push_back(std::max(half[i], half[i + width]));
    workspace_.push_back(std::move(whole));
  }
}

double StageCosts::send(std::size_t block, std::size_t source, std::size_t target, std::int64_t items) const {
  if (same_space(source, target)) return 0.0;
  const double bytes = static_cast<double>(problem_.blocks[block].boundary_bytes_per_item) * static_cast<double>(items);
  const LinkCost& link = problem_.link;
  return link.latency_seconds + (link.bytes_per_second > 0.0 ? bytes / link.bytes_per_second : 0.0);
}

std::int64_t StageCosts::fixed_bytes(std::size_t from, std::size_t to, std::int64_t items) const {
  const auto level = static_cast<std::size_t>(std::bit_width(to - from) - 1);
  const std::int64_t workspace = std::max(workspace_[level][from], workspace_[level][to - (std::size_t{1} << level)]);
  return saturating_add(parameters_[to] - parameters_[from], saturating_multiply(workspace, items));
}

std::int64_t StageCosts::flight_bytes(std::size_t from, std::size_t to, std::int64_t items) const {
  const std::int64_t boundary = from == 0 ? 0 : problem_.blocks[from].boundary_bytes_per_item;
  return saturating_multiply(saturating_add(saved_[to] - saved_[from], boundary), items);
}

std::int64_t StageCosts::tied_bytes(std::size_t first_device, std::size_t last_device) const {
  return blocks() > 1 && same_space(first_device, last_device) ? problem_.tied_bytes : 0;
}

std::int64_t StageCosts::moved_bytes(const Partition& partition, const Partition& previous) const {
  std::int64_t moved = 0;
  std::size_t now = 0;
  std::size_t before = 0;
  if (previous.cuts.empty()) return 0;
  for (std::size_t block = 0; block < blocks(); ++block) {
    if (now + 1 < partition.cuts.size() && partition.cuts[now + 1] == block) ++now;
    if (before + 1 < previous.cuts.size() && previous.cuts[before + 1] == block) ++before;
    const std::size_t device = partition.order[now];
    const std::size_t old = previous.order[before];
    if (old != device && (old >= devices() || !same_space(old, device)))
      moved += problem_.blocks[block].parameter_bytes;
  }
  return moved;
}

void stage_times(const StageCosts& costs, const Partition& partition, std::int64_t items,
                 std::vector<StageTimes>& times) {
  times.assign(partition.stages(), {});
  const auto count = static_cast<double>(items);
  for (std::size_t i = 0; i < times.size(); ++i) {
    const std::size_t to = partition.end(i, costs.blocks());
    times[i].forward = costs.forward(partition.cuts[i], to, partition.order[i], count);
    times[i].backward = costs.backward(partition.cuts[i], to, partition.order[i], count);
    if (i == 0) continue;
    const double send = costs.send(partition.cuts[i], partition.order[i - 1], partition.order[i], items);
    times[i - 1].send_forward = send;
    times[i].send_backward = send;
  }
}

std::vector<std::int64_t> stage_bytes(const StageCosts& costs, const Partition& partition, std::int64_t items,
                                      std::span<const std::int64_t> in_flight) {
  std::vector<std::int64_t> bytes;
  for (std::size_t i = 0; i < partition.stages(); ++i) {
    const std::size_t to = partition.end(i, costs.blocks());
    const std::int64_t flying = saturating_multiply(in_flight[i], costs.flight_bytes(partition.cuts[i], to, items));
    bytes.push_back(saturating_add(costs.fixed_bytes(partition.cuts[i], to, items), flying));
  }
  if (bytes.back() != kMostInt64) bytes.back() -= costs.tied_bytes(partition.order.front(), partition.order.back());
  return bytes;
}

double stage_bound(const StageCosts& costs, const Partition& partition, const BatchSizes& sizes) {
  // The first micro-batch is a larger one, and the last one is a smaller one.
  const std::int64_t first = sizes.larger;
  const std::int64_t last = sizes.larger_count == sizes.count ? sizes.larger : sizes.smaller;
  double bound = 0.0;
  double around = 0.0;
  for (std::size_t i = 0; i < partition.stages(); ++i) {
    const std::size_t from = partition.cuts[i];
    const std::size_t to = partition.end(i, costs.blocks());
    const std::size_t device = partition.order[i];
    if (i > 0) {
      around += costs.send(from, partition.order[i - 1], device, first);
      around += costs.send(from, partition.order[i - 1], device, last);
    }
    const auto items = static_cast<double>(costs.problem().batch_size);
    bound = std::max(bound, costs.work(from, to, device, items, static_cast<double>(sizes.count)) + around);
    around += costs.forward(from, to, device, static_cast<double>(first));
    around += costs.backward(from, to, device, static_cast<double>(last));
  }
  return bound;
}

StagePlan stage_plan(const StageCosts& costs, const Partition& partition, const Schedule& schedule) {
  const StageProblem& problem = costs.problem();
  const BatchSizes sizes(problem.batch_size, schedule.micro_batches);
  StagePlan plan;
  plan.cuts = partition.cuts;
  plan.order = partition.order;
  plan.schedule = schedule;
  plan.sizes.assign(static_cast<std::size_t>(sizes.count), sizes.smaller);
  std::fill_n(plan.sizes.begin(), sizes.larger_count, sizes.larger);
  stage_times(costs, partition, sizes.larger, plan.times);
  std::vector<std::int64_t> flying;
  std::vector<double> noise;
  for (std::size_t i = 0; i < partition.stages(); ++i) {
    flying.push_back(in_flight(schedule, i));
    noise.push_back(problem.devices[partition.order[i]].noise);
  }
  plan.bytes = stage_bytes(costs, partition, sizes.larger, flying);
  for (std::size_t i = 0; i < partition.stages(); ++i) {
    const StageDevice& device = problem.devices[partition.order[i]];
    if (plan.bytes[i] <= device.memory_bytes) continue;
    const std::string name = device_name(problem, partition.order[i]);
    throw OutOfMemory(
        fmt::format("stage {} needs {} bytes on {}, which has {}: {} of up to {} are in flight there; keep fewer in "
                    "flight, make micro-batches smaller, checkpoint activations, or give the stage fewer blocks",
                    i, plan.bytes[i], name, device.memory_bytes, plural(flying[i], "micro-batch", "micro-batches"),
                    plural(sizes.larger, "item")),
        name);
  }
  std::vector<StageTimes> smaller;
  stage_times(costs, partition, sizes.smaller, smaller);
  plan.seconds = noisy_mean(dataflow(schedule), {plan.times, smaller, static_cast<std::size_t>(sizes.larger_count)},
                            noise, kNoiseSamples);
  double speeds = 0.0;
  for (std::size_t i = 0; i < costs.devices(); ++i) speeds += problem.devices[i].speed;
  const double work =
      costs.work(0, costs.blocks(), 0, static_cast<double>(problem.batch_size), static_cast<double>(sizes.count)) *
      problem.devices[0].speed;
  plan.ideal_seconds = work / speeds;
  plan.bound_seconds = stage_bound(costs, partition, sizes);
  return plan;
}

void check_cuts(const StageCosts& costs, std::span<const std::size_t> cuts, const char* name) {
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    if (i == 0 ? cuts[i] == 0 : cuts[i] > cuts[i - 1] && cuts[i] < costs.blocks()) continue;
    refuse("{}[{}] is {}; cuts begin with 0, rise, and stay below the number of blocks, {}", name, i, cuts[i],
           costs.blocks());
  }
}

void check_order(const StageCosts& costs, std::span<const std::size_t> order, const char* name) {
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] >= costs.devices())
      refuse("{}[{}] is {}, but there are {}", name, i, order[i], plural(costs.devices(), "device"));
    if (std::ranges::count(order, order[i]) > 1)
      refuse("{}[{}] is {} again; a device holds one stage", name, i, order[i]);
  }
}

}  // namespace paceline::plan
