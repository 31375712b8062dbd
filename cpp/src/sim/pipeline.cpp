// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/pipeline.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/sim/random.hpp>

namespace paceline::sim {
namespace {

using plan::Action;

/// Seconds of one action of a stage without noise.
double action_seconds(const plan::StageProblem& problem, const plan::StagePlan& plan, std::size_t stage,
                      const Action& action) {
  const std::size_t end = stage + 1 < plan.cuts.size() ? plan.cuts[stage + 1] : problem.blocks.size();
  const auto items = static_cast<double>(plan.sizes[static_cast<std::size_t>(action.micro_batch)]);
  double seconds = 0.0;
  for (std::size_t b = plan.cuts[stage]; b < end; ++b) {
    const plan::BlockCost& block = problem.blocks[b];
    seconds += action.kind == Action::Kind::forward ? block.forward_fixed + block.forward_per_item * items
                                                    : block.backward_fixed + block.backward_per_item * items;
  }
  return seconds / problem.devices[plan.order[stage]].speed;
}

/// Seconds for the input of a stage, or its gradient, on its way between the stage and the one before.
double hop_seconds(const plan::StageProblem& problem, const plan::StagePlan& plan, std::size_t stage,
                   std::int64_t micro_batch) {
  const plan::StageDevice& here = problem.devices[plan.order[stage]];
  const plan::StageDevice& before = problem.devices[plan.order[stage - 1]];
  if (here.memory_space == before.memory_space) return 0.0;
  const auto bytes = static_cast<double>(problem.blocks[plan.cuts[stage]].boundary_bytes_per_item *
                                         plan.sizes[static_cast<std::size_t>(micro_batch)]);
  const plan::LinkCost& link = problem.link;
  return link.latency_seconds + (link.bytes_per_second > 0.0 ? bytes / link.bytes_per_second : 0.0);
}

}  // namespace

PipelineBox::PipelineBox(PipelineOptions options) : options_(std::move(options)) {
  const std::size_t count = options_.problem.devices.size();
  for (const Throttle& throttle : options_.throttles) {
    if (throttle.device >= count) {
      throw InvalidArgument(fmt::format("a throttle names device {}: there are {}", throttle.device, count));
    }
    if (!(throttle.factor > 0.0) || !std::isfinite(throttle.factor) || throttle.from < 0 ||
        throttle.from >= throttle.to) {
      throw InvalidArgument(
          fmt::format("a throttle of {} by factor {} from step {} to {}: the factor must be above zero, and the last "
                      "step behind the first",
                      options_.problem.devices[throttle.device].name, throttle.factor, throttle.from, throttle.to));
    }
  }
}

plan::StageProblem PipelineBox::truth(std::int64_t step) const {
  plan::StageProblem out = options_.problem;
  for (const Throttle& throttle : options_.throttles) {
    if (step >= throttle.from && step < throttle.to) out.devices[throttle.device].speed /= throttle.factor;
  }
  return out;
}

PipelineOutcome PipelineBox::run(std::int64_t step, const plan::StagePlan& plan) const {
  const plan::StageProblem problem = truth(step);
  const std::size_t stages = plan.cuts.size();
  plan::check(plan.schedule);
  if (plan.order.size() != stages || plan.schedule.stages.size() != stages ||
      std::cmp_not_equal(plan.sizes.size(), plan.schedule.micro_batches) ||
      std::ranges::any_of(plan.order, [&](std::size_t device) { return device >= problem.devices.size(); })) {
    throw InvalidArgument("this plan is not of the pipeline: its stages, devices and micro-batches do not match");
  }
  const double never = -1.0;
  using Finishes = std::vector<std::vector<double>>;  // per stage and micro-batch
  Finishes forward(stages, std::vector<double>(plan.sizes.size(), never));
  Finishes backward = forward;
  PipelineOutcome out;
  out.timings.resize(stages);
  out.actions.resize(stages);
  double busy = 0.0;
  std::vector<Random> noises;
  std::vector<std::size_t> next(stages, 0);
  std::vector<double> free(stages, 0.0);
  for (std::size_t i = 0; i < stages; ++i) {
    out.timings[i].forwards.assign(plan.sizes.size(), 0.0);
    out.timings[i].backwards.assign(plan.sizes.size(), 0.0);
    noises.emplace_back(options_.seed, static_cast<std::uint64_t>(step), plan.order[i]);
  }
  // check() has shown that the stages do not wait for each other in a circle, so each round runs an action.
  for (bool ran = true; std::exchange(ran, false);) {
    for (std::size_t i = 0; i < stages; ++i) {
      while (next[i] < plan.schedule.stages[i].size()) {
        const Action& action = plan.schedule.stages[i][next[i]];
        const auto j = static_cast<std::size_t>(action.micro_batch);
        const bool forwards = action.kind == Action::Kind::forward;
        double input = 0.0;
        if (forwards && i > 0) {
          input =
              forward[i - 1][j] < 0.0 ? never : forward[i - 1][j] + hop_seconds(problem, plan, i, action.micro_batch);
        } else if (!forwards) {
          if (i + 1 == stages) {
            input = forward[i][j];
          } else {
            input = backward[i + 1][j] < 0.0
                        ? never
                        : backward[i + 1][j] + hop_seconds(problem, plan, i + 1, action.micro_batch);
          }
        }
        if (input < 0.0) break;
        double seconds = action_seconds(problem, plan, i, action);
        // exp(sigma Z - sigma^2 / 2) has mean 1, and this relative standard deviation.
        const double noise = problem.devices[plan.order[i]].noise;
        const double sigma = std::sqrt(std::log1p(noise * noise));
        if (noise > 0.0) seconds *= std::exp(sigma * noises[i].normal() - 0.5 * sigma * sigma);
        const double start = std::max(free[i], input);
        free[i] = start + seconds;
        busy += seconds;
        out.actions[i].push_back({start, free[i]});
        (forwards ? forward : backward)[i][j] = free[i];
        (forwards ? out.timings[i].forwards : out.timings[i].backwards)[j] = seconds;
        ++next[i];
        ran = true;
      }
    }
  }
  out.seconds = *std::ranges::max_element(free);
  out.bubble = out.seconds > 0.0 ? 1.0 - busy / (static_cast<double>(stages) * out.seconds) : 0.0;
  return out;
}

plan::StagePlan even_pipeline(const plan::StageProblem& problem, std::int64_t micro_batches, bool gpipe) {
  const std::size_t stages = problem.devices.size();
  if (problem.blocks.size() < stages) {
    throw InvalidArgument(fmt::format("{} blocks cannot be divided among {} devices", problem.blocks.size(), stages));
  }
  std::vector<std::size_t> cuts;
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < stages; ++i) {
    cuts.push_back(problem.blocks.size() * i / stages);
    order.push_back(i);
  }
  const plan::Schedule schedule = gpipe ? plan::gpipe(stages, micro_batches) : plan::one_f_one_b(stages, micro_batches);
  return plan::evaluate_stages(problem, cuts, order, micro_batches, schedule);
}

PipelineSimulationResult simulate_pipeline(const PipelineSimulationOptions& options) {
  if (options.steps < 1) throw InvalidArgument(fmt::format("steps is {}: simulate at least one", options.steps));
  const PipelineBox box(options.pipeline);
  const std::int64_t batch = options.pipeline.problem.batch_size;
  balance::StageBalancer balancer(options.pipeline.problem, options.plan, options.move_cost);
  PipelineSimulationResult out;
  out.first_plan = balancer.plan(batch);
  std::map<std::vector<double>, plan::StagePlan> best;  // by the speeds of all devices
  std::int64_t seen = 0;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    const plan::StagePlan& plan = balancer.plan(batch);
    for (const balance::StageMove& move : balancer.recent_moves()) {
      if (move.step != step || std::cmp_less(move.number, seen)) continue;
      seen = move.number + 1;
      out.moves.push_back(move);
      out.elapsed_seconds += move.cost_seconds;
    }
    const PipelineOutcome outcome = box.run(step, plan);
    balancer.record(outcome.timings);
    out.step_seconds.push_back(outcome.seconds);
    out.elapsed_seconds += outcome.seconds;
    out.unmoved_seconds += box.run(step, out.first_plan).seconds;
    const plan::StageProblem truth = box.truth(step);
    std::vector<double> speeds;
    for (const plan::StageDevice& device : truth.devices) speeds.push_back(device.speed);
    auto found = best.find(speeds);
    if (found == best.end()) found = best.emplace(speeds, plan::plan_stages(truth, options.plan)).first;
    out.oracle_seconds += box.run(step, found->second).seconds;
  }
  out.last_plan = balancer.plan(batch);
  out.explanation = balancer.explain();
  return out;
}

}  // namespace paceline::sim
