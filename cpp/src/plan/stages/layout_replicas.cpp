// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <numeric>
#include <utility>

#include <paceline/error.hpp>

#include "plan/stages/layout_parts.hpp"
#include "plural.hpp"

namespace paceline::plan {
namespace {

/// The pipelines of one subset of the devices, all with the same stages.
struct SubsetPipeline {
  std::vector<std::size_t> devices;
  StageProblem problem;  // of these devices
  StagePlan plan;        // device numbers of `problem`
  std::vector<std::int64_t> depths;
  std::vector<double> seconds;  // index n: with n micro-batches; grows as asked for
};

StageProblem restricted(const StageProblem& problem, std::span<const std::size_t> devices, std::int64_t items) {
  StageProblem out = problem;
  out.batch_size = items;
  out.devices.clear();
  for (const std::size_t device : devices) out.devices.push_back(problem.devices[device]);
  return out;
}

StageOptions pipeline_options(const LayoutOptions& options, std::optional<std::int64_t> micro_batches) {
  StageOptions out;
  out.micro_batches = micro_batches;
  out.schedule = options.stages.schedule;
  out.most_in_flight = options.stages.most_in_flight;
  return out;
}

/// The best pipeline of a subset for its usual part of `count` micro-batches of `size` items; none if it does not fit.
std::optional<SubsetPipeline> group_of(const StageProblem& problem, const LayoutOptions& options,
                                       std::vector<std::size_t> devices, std::int64_t count, std::int64_t size) {
  double speed = 0.0;
  double all = 0.0;
  for (const StageDevice& device : problem.devices) all += device.speed;
  for (const std::size_t device : devices) speed += problem.devices[device].speed;
  const auto usual = std::clamp<std::int64_t>(std::llround(static_cast<double>(count) * speed / all), 1, count);
  SubsetPipeline out{.devices = std::move(devices), .problem = {}, .plan = {}, .depths = {}, .seconds = {0.0}};
  out.problem = restricted(problem, out.devices, usual * size);
  try {
    out.plan = plan_stages(out.problem, pipeline_options(options, usual));
  } catch (const OutOfMemory&) {
    return std::nullopt;
  }
  if (out.plan.order.size() < out.devices.size()) return std::nullopt;  // a smaller subset does the same
  for (std::size_t i = 0; i < out.plan.order.size(); ++i) out.depths.push_back(in_flight(out.plan.schedule, i));
  return out;
}

/// The plan of a group for n micro-batches with `items` in all, with its stages and no more in flight.
StagePlan plan_of(const SubsetPipeline& group, std::int64_t n, std::int64_t items) {
  StageProblem problem = group.problem;
  problem.batch_size = items;
  std::vector<std::int64_t> depths = group.depths;
  for (std::int64_t& depth : depths) depth = std::min(depth, n);
  return evaluate_stages(problem, group.plan.cuts, group.plan.order, n, schedule_of_depths(depths, n));
}

/// Seconds of n micro-batches of `size` items. Never decreases with n.
double seconds_of(SubsetPipeline& group, std::int64_t n, std::int64_t size) {
  while (std::cmp_less_equal(group.seconds.size(), n)) {
    const auto next = static_cast<std::int64_t>(group.seconds.size());
    group.seconds.push_back(std::max(group.seconds.back(), plan_of(group, next, next * size).seconds));
  }
  return group.seconds[static_cast<std::size_t>(n)];
}

/// The slowest device's time to reduce its stage. Every block has one owner in each pipeline.
double replicas_reduction(const StageProblem& problem, std::span<const SubsetPipeline* const> groups) {
  std::vector<std::vector<std::size_t>> owners(problem.blocks.size());
  for (const SubsetPipeline* group : groups) {
    std::size_t stage = 0;
    for (std::size_t b = 0; b < owners.size(); ++b) {
      if (stage + 1 < group->plan.cuts.size() && group->plan.cuts[stage + 1] == b) ++stage;
      owners[b].push_back(group->devices[group->plan.order[stage]]);
    }
  }
  std::vector<double> seconds(problem.devices.size(), 0.0);
  std::vector<double> latency(problem.devices.size(), 0.0);
  LinkCost copies = problem.link;
  copies.latency_seconds = 0.0;
  for (std::size_t b = 0; b < owners.size(); ++b) {
    const std::size_t spaces = count_spaces(problem, owners[b]);
    const double copy = reduction_seconds(copies, spaces, gradient_bytes_of(problem.blocks[b]));
    for (const std::size_t device : owners[b]) {
      seconds[device] += copy;
      latency[device] = std::max(latency[device], reduction_seconds(problem.link, spaces, 0));
    }
  }
  double longest = 0.0;
  for (std::size_t i = 0; i < seconds.size(); ++i) longest = std::max(longest, seconds[i] + latency[i]);
  return longest;
}

/// A layout of pipelines with the numbers of the problem's devices.
Layout laid_out(LayoutKind kind, const StageProblem& problem, std::vector<StagePlan> pipelines, double reduction) {
  Layout out{.kind = kind, .fits = true, .reduction_seconds = reduction};
  out.bytes.assign(problem.devices.size(), 0);
  out.items.assign(problem.devices.size(), 0);
  double compute = 0.0;
  double busy = 0.0;
  double stages = 0.0;
  for (const StagePlan& plan : pipelines) {
    const std::int64_t items = std::accumulate(plan.sizes.begin(), plan.sizes.end(), std::int64_t{0});
    for (std::size_t i = 0; i < plan.order.size(); ++i) {
      out.bytes[plan.order[i]] = plan.bytes[i];
      out.items[plan.order[i]] = items;
      busy += (plan.times[i].forward + plan.times[i].backward) * static_cast<double>(items) /
              static_cast<double>(plan.sizes.front());
    }
    compute = std::max(compute, plan.seconds);
    stages += static_cast<double>(plan.order.size());
  }
  out.seconds = compute + reduction;
  out.bubble = std::max(0.0, 1.0 - busy / (stages * compute));
  out.pipelines = std::move(pipelines);
  return out;
}

/// Tries all ways to divide the devices among pipelines.
struct PartitionSearch {
  struct Member {
    SubsetPipeline* group;
    std::int64_t count;  // of micro-batches
  };

  const StageProblem& problem;
  const LayoutOptions& options;
  std::int64_t count;  // of micro-batches
  std::int64_t size;   // the largest
  std::map<std::size_t, std::optional<SubsetPipeline>> groups = {};
  Layout best = {.kind = LayoutKind::replicas};

  SubsetPipeline* group(std::size_t mask) {
    auto found = groups.find(mask);
    if (found == groups.end()) {
      std::vector<std::size_t> devices;
      for (std::size_t i = 0; i < problem.devices.size(); ++i) {
        if ((mask >> i & 1) != 0) devices.push_back(i);
      }
      found = groups.emplace(mask, group_of(problem, options, std::move(devices), count, size)).first;
    }
    return found->second ? &*found->second : nullptr;
  }

  /// Device `next` joins one of the sets, or opens one.
  void extend(std::size_t next, std::vector<std::size_t>& masks) {
    if (next == problem.devices.size()) return try_partition(masks);
    for (std::size_t k = 0; k < masks.size(); ++k) {
      masks[k] |= std::size_t{1} << next;
      extend(next + 1, masks);
      masks[k] &= ~(std::size_t{1} << next);
    }
    masks.push_back(std::size_t{1} << next);
    extend(next + 1, masks);
    masks.pop_back();
  }

  void try_partition(const std::vector<std::size_t>& masks) {
    if (masks.size() < 2 || masks.size() == problem.devices.size()) return;  // those are other layouts
    std::vector<Member> members;
    for (const std::size_t mask : masks) {
      if (SubsetPipeline* one = group(mask)) members.push_back({one, 0});
    }
    if (members.size() < 2) return;
    const std::vector<std::int64_t> counts = share_out(
        count, members.size(), [&](std::size_t i, std::int64_t n) { return seconds_of(*members[i].group, n, size); });
    for (std::size_t i = 0; i < counts.size(); ++i) members[i].count = counts[i];
    std::erase_if(members, [](const Member& one) { return one.count == 0; });
    const auto staged = [](const Member& one) { return one.group->devices.size() > 1; };
    if (members.size() < 2 || std::ranges::none_of(members, staged)) return;
    double seconds = 0.0;
    std::vector<const SubsetPipeline*> working;
    for (const Member& one : members) {
      seconds = std::max(seconds, seconds_of(*one.group, one.count, size));
      working.push_back(one.group);
    }
    const double reduction = (1.0 - options.overlap) * replicas_reduction(problem, working);
    if (!best.fits || seconds + reduction < best.seconds) best = layout_of(members, reduction);
  }

  [[nodiscard]] Layout layout_of(const std::vector<Member>& members, double reduction) const {
    std::int64_t done = 0;
    std::vector<StagePlan> plans;
    std::vector<std::string> texts;
    for (const Member& one : members) {
      // Rounded like this, no micro-batch is larger than the largest that was planned for.
      const std::int64_t before = problem.batch_size * done / count;
      done += one.count;
      StagePlan& plan = plans.emplace_back(plan_of(*one.group, one.count, problem.batch_size * done / count - before));
      std::vector<std::string> names;
      for (std::size_t& device : plan.order) {
        device = one.group->devices[device];
        names.push_back(problem.devices[device].name);
      }
      texts.push_back(fmt::format("[{}] run {}", fmt::join(names, ", "), one.count));
    }
    Layout out = laid_out(LayoutKind::replicas, problem, std::move(plans), reduction);
    out.reason =
        fmt::format("of {} micro-batches {}; bubbles take {:.1f} % of a step, and the exposed reduction {:.1f} %",
                    count, fmt::join(texts, " and "), 100.0 * out.bubble * (out.seconds - reduction) / out.seconds,
                    100.0 * reduction / out.seconds);
    return out;
  }
};

}  // namespace

Layout pipeline_layout(const StageProblem& problem, const LayoutOptions& options) {
  Layout out{.kind = LayoutKind::pipeline};
  try {
    out = laid_out(out.kind, problem, {plan_stages(problem, pipeline_options(options, options.stages.micro_batches))},
                   0.0);
  } catch (const OutOfMemory& error) {
    out.reason = error.what();
    return out;
  }
  const StagePlan& plan = out.pipelines.front();
  out.reason = fmt::format("{} of {} devices, {}, the bubble takes {:.1f} % of a step", plan.order.size(),
                           problem.devices.size(), plural(plan.sizes.size(), "micro-batch", "micro-batches"),
                           100.0 * out.bubble);
  return out;
}

Layout replicas_layout(const StageProblem& problem, const LayoutOptions& options, const Layout& single) {
  Layout best{.kind = LayoutKind::replicas, .reason = "no two disjoint sets of devices hold a model each"};
  if (problem.devices.size() > kMostSubsetDevices) {
    best.reason = fmt::format("not looked for: {} devices have too many partitions; up to {} are searched",
                              problem.devices.size(), kMostSubsetDevices);
    return best;
  }
  if (problem.devices.size() < 3) {
    best.reason = "two pipelines, one of them with two stages, need three devices";
    return best;
  }
  if (!single.fits) {
    best.reason = "not even one pipeline fits";
    return best;
  }
  const auto base = static_cast<std::int64_t>(single.pipelines.front().sizes.size());
  // Each pipeline has a bubble of its own, so more and smaller micro-batches may pay where one pipeline has enough.
  for (const std::int64_t total : {base, 2 * base, 4 * base}) {
    if (total > problem.batch_size || (total > base && options.stages.micro_batches)) break;
    const std::int64_t size = problem.batch_size / total + (problem.batch_size % total != 0 ? 1 : 0);
    PartitionSearch search{.problem = problem, .options = options, .count = total, .size = size};
    std::vector<std::size_t> masks;
    search.extend(0, masks);
    if (search.best.fits && (!best.fits || search.best.seconds < best.seconds)) best = std::move(search.best);
  }
  return best;
}

}  // namespace paceline::plan
