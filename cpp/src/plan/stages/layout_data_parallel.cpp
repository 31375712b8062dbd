// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <bit>
#include <numeric>

#include "bytes_text.hpp"
#include "plan/stages/layout_parts.hpp"

namespace paceline::plan {
namespace {

/// The whole model on one device.
struct Whole {
  double fixed = 0.0;  // seconds of a micro-batch at speed 1, forward and backward
  double per_item = 0.0;
  std::int64_t weights = 0, gradients = 0, optimizer = 0;
  std::int64_t item_bytes = 0;  // what an item of a micro-batch needs while it runs

  explicit Whole(const StageProblem& problem) {
    std::int64_t workspace = 0;
    for (const BlockCost& block : problem.blocks) {
      fixed += block.forward_fixed + block.backward_fixed;
      per_item += block.forward_per_item + block.backward_per_item;
      const ParameterParts parts = parts_of(block);
      weights += parts.weights;
      gradients += parts.gradients;
      optimizer += parts.optimizer;
      item_bytes += block.saved_bytes_per_item;
      workspace = std::max(workspace, block.workspace_bytes_per_item);
    }
    item_bytes += workspace;
    // What the first and the last block share is there once. It is counted with both.
    weights = std::max<std::int64_t>(0, weights - problem.tied_bytes);
  }
};

/// Devices that take part, with what they hold.
struct Team {
  std::vector<std::size_t> devices;
  std::vector<std::int64_t> most_items;  // of a micro-batch, per device of the team
  std::vector<double> optimizer;         // parts, per device of the team; empty: each holds all
};

std::int64_t room(std::int64_t memory, std::int64_t taken) { return memory > taken ? memory - taken : 0; }

/// Parts of the optimizer's state, as even as `free` bytes allow; empty if they do not suffice.
std::vector<double> even_parts(std::span<const double> free, double bytes) {
  std::vector<double> parts(free.size(), 0.0);
  if (bytes <= 0.0) return std::vector<double>(free.size(), 1.0 / static_cast<double>(free.size()));
  if (std::accumulate(free.begin(), free.end(), 0.0) < bytes) return {};
  std::vector<std::size_t> order(free.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return free[i]; });
  double left = bytes;
  for (std::size_t k = 0; k < order.size(); ++k) {  // the fullest first; what it cannot take is shared by the others
    const double part = std::min(free[order[k]], left / static_cast<double>(order.size() - k));
    parts[order[k]] = part / bytes;
    left -= part;
  }
  return parts;
}

/// These devices, if they can hold the model.
std::optional<Team> team_of(const StageProblem& problem, const Whole& whole, std::vector<std::size_t> devices,
                            bool sharded) {
  Team team{.devices = std::move(devices), .most_items = {}, .optimizer = {}};
  const std::int64_t held = whole.weights + whole.gradients + (sharded ? 0 : whole.optimizer);
  if (!sharded) {
    for (const std::size_t device : team.devices) {
      const std::int64_t left = room(problem.devices[device].memory_bytes, held);
      if (left < whole.item_bytes || problem.devices[device].memory_bytes < held) return std::nullopt;
      team.most_items.push_back(whole.item_bytes > 0 ? left / whole.item_bytes : problem.batch_size);
    }
    return team;
  }
  // The largest micro-batch that leaves room for the optimizer's state.
  for (std::int64_t items = problem.batch_size; items >= 1; items /= 2) {
    std::vector<double> free;
    bool all = true;
    for (const std::size_t device : team.devices) {
      const std::int64_t memory = problem.devices[device].memory_bytes;
      all = all && memory - held >= items * whole.item_bytes;
      free.push_back(static_cast<double>(room(memory, held + items * whole.item_bytes)));
    }
    if (!all) continue;
    team.optimizer = even_parts(free, static_cast<double>(whole.optimizer));
    if (team.optimizer.empty()) continue;
    team.most_items.assign(team.devices.size(), items);
    return team;
  }
  return std::nullopt;
}

Layout layout_of(const StageProblem& problem, const LayoutOptions& options, const Whole& whole, const Team& team,
                 bool sharded) {
  const auto seconds = [&](std::size_t i, std::int64_t items) {
    const std::int64_t runs = items / team.most_items[i] + (items % team.most_items[i] != 0 ? 1 : 0);
    return (whole.fixed * static_cast<double>(runs) + whole.per_item * static_cast<double>(items)) /
           problem.devices[team.devices[i]].speed;
  };
  const std::vector<std::int64_t> shares = share_out(problem.batch_size, team.devices.size(), seconds);
  Layout out{.kind = sharded ? LayoutKind::sharded_data_parallel : LayoutKind::data_parallel,
             .fits = true,
             .runnable = !sharded};
  out.bytes.assign(problem.devices.size(), 0);
  out.items.assign(problem.devices.size(), 0);
  if (sharded) out.optimizer_shares.assign(problem.devices.size(), 0.0);
  double compute = 0.0;
  double busy = 0.0;
  double working = 0.0;
  std::vector<std::size_t> used;
  for (std::size_t i = 0; i < team.devices.size(); ++i) {
    const std::size_t device = team.devices[i];
    const double part = sharded ? team.optimizer[i] : 1.0;
    if (sharded) out.optimizer_shares[device] = part;
    if (shares[i] == 0 && !sharded) continue;
    used.push_back(device);
    out.items[device] = shares[i];
    out.bytes[device] = whole.weights + whole.gradients + std::llround(part * static_cast<double>(whole.optimizer)) +
                        whole.item_bytes * std::min(shares[i], team.most_items[i]);
    if (shares[i] == 0) continue;
    const double time = seconds(i, shares[i]);
    compute = std::max(compute, time);
    busy += time;
    working += 1.0;
  }
  out.reduction_seconds =
      (1.0 - options.overlap) * reduction_seconds(problem.link, count_spaces(problem, used), whole.gradients);
  out.seconds = compute + out.reduction_seconds;
  out.bubble = compute > 0.0 ? 1.0 - busy / (working * compute) : 0.0;
  return out;
}

std::vector<std::vector<std::size_t>> subsets(const StageProblem& problem) {
  std::vector<std::size_t> all(problem.devices.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  std::vector<std::vector<std::size_t>> out;
  if (all.size() <= kMostSubsetDevices) {
    for (std::size_t mask = 1; mask < std::size_t{1} << all.size(); ++mask) {
      std::vector<std::size_t>& subset = out.emplace_back();
      for (const std::size_t i : all) {
        if ((mask >> i & 1) != 0) subset.push_back(i);
      }
    }
    return out;
  }
  std::ranges::stable_sort(all, std::greater{}, [&](std::size_t i) { return problem.devices[i].speed; });
  for (std::size_t k = 1; k <= all.size(); ++k) {
    out.emplace_back(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(k));
    std::ranges::sort(out.back());
  }
  return out;
}

}  // namespace

Layout data_parallel_layout(const StageProblem& problem, const LayoutOptions& options, bool sharded) {
  const Whole whole(problem);
  Layout best{.kind = sharded ? LayoutKind::sharded_data_parallel : LayoutKind::data_parallel, .runnable = !sharded};
  for (std::vector<std::size_t>& devices : subsets(problem)) {
    if (sharded && devices.size() < 2) continue;
    const std::optional<Team> team = team_of(problem, whole, std::move(devices), sharded);
    if (!team) continue;
    Layout one = layout_of(problem, options, whole, *team, sharded);
    if (!best.fits || one.seconds < best.seconds) best = std::move(one);
  }
  const std::int64_t all = whole.weights + whole.gradients + whole.optimizer;
  if (best.fits) {
    best.reason = fmt::format("{}{} of {} devices, the exposed reduction takes {:.1f} % of a step",
                              sharded ? "cannot run yet; " : "",
                              std::ranges::count_if(best.items, [](std::int64_t n) { return n > 0; }),
                              problem.devices.size(), 100.0 * best.reduction_seconds / best.seconds);
    if (sharded) best.reason += fmt::format("; {} of the optimizer's state are divided", bytes_text(whole.optimizer));
    return best;
  }
  const StageDevice& most = *std::ranges::max_element(problem.devices, {}, &StageDevice::memory_bytes);
  best.reason =
      sharded ? fmt::format(
                    "weights and gradients take {} on each device, and the optimizer's state {} on "
                    "all together, and an item {} more; {} has the most memory, {}",
                    bytes_text(whole.weights + whole.gradients), bytes_text(whole.optimizer),
                    bytes_text(whole.item_bytes), most.name, bytes_text(most.memory_bytes))
              : fmt::format("the whole model takes {}, and an item {} more; {} has the most memory, {}",
                            bytes_text(all), bytes_text(whole.item_bytes), most.name, bytes_text(most.memory_bytes));
  return best;
}

}  // namespace paceline::plan
