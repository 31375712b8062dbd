// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/plan/random.hpp>

namespace paceline::balance {

inline constexpr std::int64_t kMiB = 1 << 20;

inline plan::StageProblem problem(std::size_t blocks, std::size_t devices, bool one_space = true) {
  plan::StageProblem out;
  out.blocks.assign(blocks, {.forward_fixed = 0.0002,
                             .forward_per_item = 0.0004,
                             .backward_fixed = 0.0004,
                             .backward_per_item = 0.0008,
                             .parameter_bytes = 16 * kMiB,
                             .saved_bytes_per_item = kMiB,
                             .boundary_bytes_per_item = kMiB / 16,
                             .workspace_bytes_per_item = 0});
  for (std::size_t i = 0; i < devices; ++i) {
    out.devices.push_back({.name = "sim:" + std::to_string(i), .memory_space = one_space ? 0 : i});
  }
  return out;
}

inline plan::StageOptions in_micro_batches(std::int64_t count) {
  plan::StageOptions out;
  out.micro_batches = count;
  return out;
}

/// A pipeline of devices whose true times may differ from what the balancer was given.
struct Box {
  StageBalancer balancer;
  plan::StageProblem truth;
  double noise = 0.0;
  std::function<double(std::int64_t, std::size_t)> slow = [](std::int64_t, std::size_t) { return 1.0; };
  std::int64_t batch = 32;
  std::uint64_t seed = 1;

  void step() {
    const plan::StagePlan& plan = balancer.plan(batch);
    const std::int64_t step = balancer.steps();
    std::vector<MeasuredStage> timings(plan.cuts.size());
    for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
      plan::Random random(seed, static_cast<std::uint64_t>(step), plan.order[i]);
      const std::size_t end = i + 1 < plan.cuts.size() ? plan.cuts[i + 1] : truth.blocks.size();
      const double factor = slow(step, plan.order[i]) / truth.devices[plan.order[i]].speed;
      for (const std::int64_t size : plan.sizes) {
        double forward = 0.0;
        double backward = 0.0;
        for (std::size_t b = plan.cuts[i]; b < end; ++b) {
          const plan::BlockCost& block = truth.blocks[b];
          forward += block.forward_fixed + block.forward_per_item * static_cast<double>(size);
          backward += block.backward_fixed + block.backward_per_item * static_cast<double>(size);
        }
        timings[i].forwards.push_back(forward * factor * std::exp(noise * random.normal()));
        timings[i].backwards.push_back(backward * factor * std::exp(noise * random.normal()));
      }
    }
    balancer.record(timings);
  }
  void run(int steps) {
    for (int k = 0; k < steps; ++k) step();
  }
  /// The number of blocks on a device.
  [[nodiscard]] std::size_t blocks_on(std::size_t device) {
    const plan::StagePlan& plan = balancer.plan(batch);
    for (std::size_t i = 0; i < plan.order.size(); ++i) {
      if (plan.order[i] != device) continue;
      return (i + 1 < plan.cuts.size() ? plan.cuts[i + 1] : truth.blocks.size()) - plan.cuts[i];
    }
    return 0;
  }
};

inline Box box(const plan::StageProblem& problem, MoveCost cost = {},
               plan::StageOptions options = in_micro_batches(8)) {
  return {.balancer = StageBalancer(problem, std::move(options), cost), .truth = problem};
}

inline std::function<double(std::int64_t, std::size_t)> slower(std::size_t which, double factor, std::int64_t from,
                                                               std::int64_t to) {
  return [=](std::int64_t step, std::size_t i) { return i == which && step >= from && step < to ? factor : 1.0; };
}

}  // namespace paceline::balance
