// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <numeric>

#include "bytes_text.hpp"
#include "plan/stages/layout_parts.hpp"

namespace paceline::plan {
namespace {

/// The whole model on one device.
struct Whole {
  double fixed = 0.0;  // seconds of a micro-batch at speed 1, forward and backward
  double per_item = 0.0;
  std::int64_t parameters = 0, gradients = 0;
  std::int64_t item_bytes = 0;  // what an item of a micro-batch needs while it runs

  explicit Whole(const StageProblem& problem) {
    std::int64_t workspace = 0;
    for (const BlockCost& block : problem.blocks) {
      fixed += block.forward_fixed + block.backward_fixed;
      per_item += block.forward_per_item + block.backward_per_item;
      parameters += block.parameter_bytes;
      gradients += gradient_bytes_of(block);
      item_bytes += block.saved_bytes_per_item;
      workspace = std::max(workspace, block.workspace_bytes_per_item);
    }
    item_bytes += workspace;
    // What the first and the last block share is there once. It is counted with both.
    parameters -= problem.blocks.size() > 1 ? problem.tied_bytes : 0;
  }

  /// The most items of a micro-batch on this device; 0: not even one.
  [[nodiscard]] std::int64_t most_items(const StageProblem& problem, std::size_t device) const {
    const std::int64_t memory = problem.devices[device].memory_bytes;
    if (memory < parameters) return 0;
    return item_bytes > 0 ? (memory - parameters) / item_bytes : problem.batch_size;
  }
};

Layout layout_of(const StageProblem& problem, const LayoutOptions& options, const Whole& whole,
                 const std::vector<std::size_t>& devices) {
  const auto seconds = [&](std::size_t i, std::int64_t items) {
    const std::int64_t most = whole.most_items(problem, devices[i]);
    const std::int64_t runs = items / most + (items % most != 0 ? 1 : 0);
    return (whole.fixed * static_cast<double>(runs) + whole.per_item * static_cast<double>(items)) /
           problem.devices[devices[i]].speed;
  };
  const std::vector<std::int64_t> shares = share_out(problem.batch_size, devices.size(), seconds);
  Layout out{.kind = LayoutKind::data_parallel, .fits = true};
  out.bytes.assign(problem.devices.size(), 0);
  out.items.assign(problem.devices.size(), 0);
  double compute = 0.0;
  double busy = 0.0;
  std::vector<std::size_t> used;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (shares[i] == 0) continue;
    const std::size_t device = devices[i];
    used.push_back(device);
    out.items[device] = shares[i];
    out.bytes[device] = whole.parameters + whole.item_bytes * std::min(shares[i], whole.most_items(problem, device));
    compute = std::max(compute, seconds(i, shares[i]));
    busy += seconds(i, shares[i]);
  }
  out.reduction_seconds =
      (1.0 - options.overlap) * reduction_seconds(problem.link, count_spaces(problem, used), whole.gradients);
  out.seconds = compute + out.reduction_seconds;
  out.bubble = compute > 0.0 ? 1.0 - busy / (static_cast<double>(used.size()) * compute) : 0.0;
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

Layout data_parallel_layout(const StageProblem& problem, const LayoutOptions& options) {
  const Whole whole(problem);
  Layout best{.kind = LayoutKind::data_parallel};
  for (const std::vector<std::size_t>& devices : subsets(problem)) {
    if (std::ranges::any_of(devices, [&](std::size_t i) { return whole.most_items(problem, i) == 0; })) continue;
    Layout one = layout_of(problem, options, whole, devices);
    if (!best.fits || one.seconds < best.seconds) best = std::move(one);
  }
  if (best.fits) {
    best.reason = fmt::format("{} of {} devices, the exposed reduction takes {:.1f} % of a step",
                              std::ranges::count_if(best.items, [](std::int64_t n) { return n > 0; }),
                              problem.devices.size(), 100.0 * best.reduction_seconds / best.seconds);
    return best;
  }
  const StageDevice& most = *std::ranges::max_element(problem.devices, {}, &StageDevice::memory_bytes);
  best.reason =
      fmt::format("the whole model takes {}, and an item {} more; {} has the most memory, {}",
                  bytes_text(whole.parameters), bytes_text(whole.item_bytes), most.name, bytes_text(most.memory_bytes));
  return best;
}

}  // namespace paceline::plan
