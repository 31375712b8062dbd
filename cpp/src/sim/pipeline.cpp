// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/pipeline.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <paceline/plan/random.hpp>

#include "plan/stages/dataflow.hpp"
#include "plan/stages/stage_costs.hpp"
#include "refuse.hpp"

namespace paceline::sim {
PipelineBox::PipelineBox(PipelineOptions options) : options_(std::move(options)) {
  const std::size_t count = options_.problem.devices.size();
  for (const Throttle& throttle : options_.throttles) {
    if (throttle.device >= count) refuse("a throttle names device {}: there are {}", throttle.device, count);
    if (!(throttle.factor > 0.0) || !std::isfinite(throttle.factor) || throttle.from < 0 ||
        throttle.from >= throttle.to) {
      refuse(
          "a throttle of {} by factor {} from step {} to {}: the factor must be above zero, and the last "
          "step behind the first",
          options_.problem.devices[throttle.device].name, throttle.factor, throttle.from, throttle.to);
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
  const std::vector<plan::FlowAction> flow = plan::dataflow(plan.schedule);
  if (plan.order.size() != stages || plan.schedule.stages.size() != stages ||
      std::cmp_not_equal(plan.sizes.size(), plan.schedule.micro_batches) ||
      std::ranges::any_of(plan.order, [&](std::size_t device) { return device >= problem.devices.size(); })) {
    refuse("this plan is not of the pipeline: its stages, devices and micro-batches do not match");
  }
  const plan::StageCosts costs(problem);
  std::vector<std::vector<plan::StageTimes>> times(plan.sizes.size());  // per micro-batch and stage
  for (std::size_t j = 0; j < times.size(); ++j) {
    plan::stage_times(costs, {plan.cuts, plan.order}, plan.sizes[j], times[j]);
  }
  PipelineOutcome out;
  out.timings.resize(stages);
  out.actions.resize(stages);
  double busy = 0.0;
  std::vector<plan::Random> noises;
  for (std::size_t i = 0; i < stages; ++i) {
    out.timings[i].forwards.assign(plan.sizes.size(), 0.0);
    out.timings[i].backwards.assign(plan.sizes.size(), 0.0);
    noises.emplace_back(options_.seed, static_cast<std::uint64_t>(step), plan.order[i]);
  }
  plan::Recurrence clock;
  clock.begin(stages, plan.sizes.size());
  for (const plan::FlowAction& action : flow) {
    const plan::StageTimes& takes = times[action.micro_batch][action.stage];
    double seconds = action.forward ? takes.forward : takes.backward;
    // exp(sigma Z - sigma^2 / 2) has mean 1, and this relative standard deviation.
    const double noise = problem.devices[plan.order[action.stage]].noise;
    const double sigma = std::sqrt(std::log1p(noise * noise));
    if (noise > 0.0) seconds *= std::exp(sigma * noises[action.stage].normal() - 0.5 * sigma * sigma);
    busy += seconds;
    balance::MeasuredStage& timings = out.timings[action.stage];
    (action.forward ? timings.forwards : timings.backwards)[action.micro_batch] = seconds;
    out.actions[action.stage].push_back(clock.run(action.stage, action.micro_batch, action.forward, seconds,
                                                  action.forward ? takes.send_forward : takes.send_backward));
  }
  out.seconds = clock.seconds();
  out.bubble = out.seconds > 0.0 ? 1.0 - busy / (static_cast<double>(stages) * out.seconds) : 0.0;
  return out;
}

plan::StagePlan even_pipeline(const plan::StageProblem& problem, std::int64_t micro_batches, bool gpipe) {
  const std::size_t stages = problem.devices.size();
  if (problem.blocks.size() < stages)
    refuse("{} blocks cannot be divided among {} devices", problem.blocks.size(), stages);
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
  if (options.steps < 1) refuse("steps is {}: simulate at least one", options.steps);
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
