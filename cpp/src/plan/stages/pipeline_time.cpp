// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/pipeline_time.hpp>

#include <algorithm>
#include <array>
#include <cmath>

#include <paceline/plan/random.hpp>

#include "plan/stages/dataflow.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

void check_seconds(double seconds, const char* name, std::size_t index) {
  if (!(seconds >= 0.0) || !std::isfinite(seconds))
    refuse("{}[{}] is {}; it must be finite and not negative", name, index, seconds);
}

void check_times(std::span<const StageTimes> stages) {
  for (std::size_t i = 0; i < stages.size(); ++i) {
    check_seconds(stages[i].forward, "forward", i);
    check_seconds(stages[i].backward, "backward", i);
    check_seconds(stages[i].send_forward, "send_forward", i);
    check_seconds(stages[i].send_backward, "send_backward", i);
  }
}

void check_inputs(const Schedule& schedule, std::span<const StageTimes> stages, std::span<const double> scale) {
  if (stages.size() != schedule.stages.size())
    refuse("the schedule has {}, but there are times of {}", plural(schedule.stages.size(), "stage"),
           plural(stages.size(), "stage"));
  check_times(stages);
  if (!scale.empty() && scale.size() != static_cast<std::size_t>(std::max<std::int64_t>(schedule.micro_batches, 0)))
    refuse("scale has {}, but there are {}", plural(scale.size(), "factor"),
           plural(schedule.micro_batches, "micro-batch", "micro-batches"));
  for (std::size_t i = 0; i < scale.size(); ++i) check_seconds(scale[i], "scale", i);
}

std::size_t count_of(const std::vector<FlowAction>& flow) {
  std::size_t count = 0;
  for (const FlowAction& action : flow) count = std::max(count, action.micro_batch + 1);
  return count;
}

}  // namespace

PipelineTimes pipeline_times(const Schedule& schedule, std::span<const StageTimes> stages,
                             std::span<const double> scale) {
  const std::vector<FlowAction> flow = dataflow(schedule);
  check_inputs(schedule, stages, scale);
  const FlowTimes seconds{.larger = stages, .scale = scale};
  PipelineTimes times;
  times.busy_seconds.assign(stages.size(), 0.0);
  for (const std::vector<Action>& actions : schedule.stages) times.actions.emplace_back(actions.size());
  Recurrence clock;
  clock.begin(stages.size(), count_of(flow));
  for (const FlowAction& action : flow) {
    const ActionSpan span =
        clock.run(action.stage, action.micro_batch, action.forward, seconds.seconds(action), seconds.send(action));
    times.actions[action.stage][action.position] = span;
    times.busy_seconds[action.stage] += span.finish - span.start;
  }
  times.seconds = clock.seconds();
  return times;
}

double expected_seconds(const Schedule& schedule, std::span<const StageTimes> stages, std::span<const double> noise,
                        std::size_t samples, std::span<const double> scale) {
  const std::vector<FlowAction> flow = dataflow(schedule);
  check_inputs(schedule, stages, scale);
  if (noise.size() != stages.size())
    refuse("noise has {}, but there are {}", plural(noise.size(), "number"), plural(stages.size(), "stage"));
  for (std::size_t i = 0; i < noise.size(); ++i) check_seconds(noise[i], "noise", i);
  if (samples == 0) refuse("samples is 0; a mean needs at least one sample");
  return noisy_mean(flow, {.larger = stages, .scale = scale}, noise, samples);
}

double noisy_mean(const std::vector<FlowAction>& flow, const FlowTimes& times, std::span<const double> noise,
                  std::size_t samples) {
  const std::size_t count = count_of(flow);
  if (std::ranges::all_of(noise, [](double part) { return part == 0.0; })) samples = 1;
  std::vector<std::array<double, 2>> factors(noise.size() * count, {1.0, 1.0});  // of the forward and of the backward
  Recurrence clock;
  double sum = 0.0;
  for (std::size_t sample = 0; sample < samples; ++sample) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      const double sigma = std::sqrt(std::log1p(noise[i / count] * noise[i / count]));
      if (sigma == 0.0) continue;
      Random random(sample, i / count, i % count);
      for (double& factor : factors[i]) factor = std::exp(sigma * random.normal() - sigma * sigma / 2.0);  // mean 1
    }
    clock.begin(noise.size(), count);
    for (const FlowAction& action : flow) {
      const double factor = factors[action.stage * count + action.micro_batch][action.forward ? 0 : 1];
      clock.run(action.stage, action.micro_batch, action.forward, times.seconds(action) * factor, times.send(action));
    }
    sum += clock.seconds();
  }
  return sum / static_cast<double>(samples);
}

}  // namespace paceline::plan
