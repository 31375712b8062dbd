// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/pipeline_time.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include <paceline/error.hpp>

#include "plan/stages/dataflow.hpp"
#include "plural.hpp"

namespace paceline::plan {
namespace {

void check_seconds(double seconds, const char* name, std::size_t index) {
  if (!(seconds >= 0.0) || !std::isfinite(seconds))
    throw InvalidArgument(fmt::format("{}[{}] is {}; it must be finite and not negative", name, index, seconds));
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
    throw InvalidArgument(fmt::format("the schedule has {}, but there are times of {}",
                                      plural(schedule.stages.size(), "stage"), plural(stages.size(), "stage")));
  check_times(stages);
  if (!scale.empty() && scale.size() != static_cast<std::size_t>(std::max<std::int64_t>(schedule.micro_batches, 0)))
    throw InvalidArgument(fmt::format("scale has {}, but there are {}", plural(scale.size(), "factor"),
                                      plural(schedule.micro_batches, "micro-batch", "micro-batches")));
  for (std::size_t i = 0; i < scale.size(); ++i) check_seconds(scale[i], "scale", i);
}

/// SplitMix64 (Steele, Lea & Flood, 2014).
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

/// Two standard normal numbers (Box & Muller, 1958) that depend on nothing but the key: one for the forward of a
/// micro-batch, one for its backward. std::normal_distribution differs between standard libraries.
std::array<double, 2> normals(std::size_t sample, std::size_t stage, std::size_t micro_batch) {
  const std::uint64_t key = mixed(mixed(mixed(sample) ^ stage) ^ micro_batch);
  const auto unit = [](std::uint64_t bits) { return (static_cast<double>(bits >> 11U) + 0.5) * 0x1p-53; };
  const double radius = std::sqrt(-2.0 * std::log(unit(key)));
  const double angle = 2.0 * std::numbers::pi * unit(mixed(key));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

/// The mean of `samples` replays of a flow, where an action takes seconds(action) * a random factor.
template <class Seconds, class Send>
double mean_of_replays(const std::vector<FlowAction>& flow, std::size_t stages, std::span<const double> noise,
                       std::size_t samples, const Seconds& seconds, const Send& send) {
  const auto none = [](const FlowAction&, const ActionSpan&) {};
  if (std::ranges::all_of(noise, [](double part) { return part == 0.0; }))
    return replay(flow, stages, seconds, send, none);
  std::vector<double> sigma;
  for (const double part : noise) sigma.push_back(std::sqrt(std::log1p(part * part)));
  std::size_t micro_batches = 0;
  for (const FlowAction& action : flow) micro_batches = std::max(micro_batches, action.micro_batch + 1);
  std::vector<std::array<double, 2>> factors(stages * micro_batches);
  double sum = 0.0;
  for (std::size_t sample = 0; sample < samples; ++sample) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      const double s = sigma[i / micro_batches];
      factors[i] = {1.0, 1.0};
      if (s == 0.0) continue;
      const std::array<double, 2> z = normals(sample, i / micro_batches, i % micro_batches);
      for (std::size_t j = 0; j < 2; ++j) factors[i][j] = std::exp(s * z[j] - s * s / 2.0);  // mean 1
    }
    sum += replay(
        flow, stages,
        [&](const FlowAction& action) {
          const std::array<double, 2>& factor = factors[action.stage * micro_batches + action.micro_batch];
          return seconds(action) * factor[action.forward ? 0 : 1];
        },
        send, none);
  }
  return sum / static_cast<double>(samples);
}

}  // namespace

PipelineTimes pipeline_times(const Schedule& schedule, std::span<const StageTimes> stages,
                             std::span<const double> scale) {
  const std::vector<FlowAction> flow = dataflow(schedule);
  check_inputs(schedule, stages, scale);
  const auto factor = [&](const FlowAction& action) { return scale.empty() ? 1.0 : scale[action.micro_batch]; };
  PipelineTimes times;
  times.busy_seconds.assign(stages.size(), 0.0);
  for (const std::vector<Action>& actions : schedule.stages) times.actions.emplace_back(actions.size());
  times.seconds = replay(
      flow, stages.size(),
      [&](const FlowAction& action) {
        const StageTimes& stage = stages[action.stage];
        return (action.forward ? stage.forward : stage.backward) * factor(action);
      },
      [&](const FlowAction& action) {
        const StageTimes& stage = stages[action.stage];
        return (action.forward ? stage.send_forward : stage.send_backward) * factor(action);
      },
      [&](const FlowAction& action, const ActionSpan& span) {
        times.actions[action.stage][action.position] = span;
        times.busy_seconds[action.stage] += span.finish - span.start;
      });
  return times;
}

double expected_seconds(const Schedule& schedule, std::span<const StageTimes> stages, std::span<const double> noise,
                        std::size_t samples, std::span<const double> scale) {
  const std::vector<FlowAction> flow = dataflow(schedule);
  check_inputs(schedule, stages, scale);
  if (noise.size() != stages.size())
    throw InvalidArgument(
        fmt::format("noise has {}, but there are {}", plural(noise.size(), "number"), plural(stages.size(), "stage")));
  for (std::size_t i = 0; i < noise.size(); ++i) check_seconds(noise[i], "noise", i);
  if (samples == 0) throw InvalidArgument("samples is 0; a mean needs at least one sample");
  const auto factor = [&](const FlowAction& action) { return scale.empty() ? 1.0 : scale[action.micro_batch]; };
  return mean_of_replays(
      flow, stages.size(), noise, samples,
      [&](const FlowAction& action) {
        const StageTimes& stage = stages[action.stage];
        return (action.forward ? stage.forward : stage.backward) * factor(action);
      },
      [&](const FlowAction& action) {
        const StageTimes& stage = stages[action.stage];
        return (action.forward ? stage.send_forward : stage.send_backward) * factor(action);
      });
}

double noisy_mean(const std::vector<FlowAction>& flow, std::size_t stages, const TwoSizes& times,
                  std::span<const double> noise, std::size_t samples) {
  return mean_of_replays(
      flow, stages, noise, samples,
      [&](const FlowAction& action) { return action.forward ? times.of(action).forward : times.of(action).backward; },
      [&](const FlowAction& action) {
        return action.forward ? times.of(action).send_forward : times.of(action).send_backward;
      });
}

double pipeline_bound(std::span<const StageTimes> stages, std::int64_t micro_batches) {
  if (stages.empty()) throw InvalidArgument("a pipeline needs at least one stage");
  if (micro_batches < 1)
    throw InvalidArgument(fmt::format("micro_batches is {}; there is at least one micro-batch", micro_batches));
  check_times(stages);
  double bound = 0.0;
  double around = 0.0;  // from stage 0 to this one and back
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (i > 0) around += stages[i].send_backward;
    bound = std::max(bound, static_cast<double>(micro_batches) * (stages[i].forward + stages[i].backward) + around);
    around += stages[i].forward + stages[i].backward + stages[i].send_forward;
  }
  return bound;
}

}  // namespace paceline::plan
