// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include <paceline/plan/random.hpp>
#include <paceline/sim/scenario.hpp>

namespace paceline::sim {
namespace {

constexpr std::size_t kOdd = 3;  // the device that misbehaves where only one does
constexpr double kNoise = 0.03;
constexpr std::int64_t kScenarioSteps = 800;

/// A box whose devices have these speeds, with the events of `box`.
SimulationOptions box_of(const std::vector<double>& speeds, double noise, std::int64_t steps, BoxOptions box = {}) {
  for (const double speed : speeds) {
    box.devices.push_back({.name = fmt::format("sim:{}", box.devices.size()), .speed = speed});
  }
  box.noise = noise;
  return {.box = std::move(box), .steps = steps};
}

SimulationOptions eight(BoxOptions box, double noise = kNoise, std::int64_t steps = kScenarioSteps) {
  return box_of(std::vector<double>(8, 1.0), noise, steps, std::move(box));
}

/// Throttles of one device for `length` of every `period` steps, from step `first` on.
std::vector<Throttle> repeated(double factor, std::int64_t length, std::int64_t period, std::int64_t first = 0) {
  std::vector<Throttle> throttles;
  for (std::int64_t k = first; k < kScenarioSteps; k += period) throttles.push_back({kOdd, factor, k, k + length});
  return throttles;
}

SimulationOptions costly_moves() {
  SimulationOptions options = eight({.throttles = repeated(1.5, 4, 40)});
  for (SimDevice& device : options.box.devices) device.first_run_seconds = 0.1;
  return options;
}

std::vector<Drift> warm_up() {
  std::vector<Drift> drifts;
  for (std::size_t i = 0; i < 4; ++i) drifts.push_back({i, 1.6, 1.0, 0, 40});
  return drifts;
}

std::vector<Pause> first_steps() {
  std::vector<Pause> pauses;
  for (std::size_t i = 0; i < 8; ++i) pauses.push_back({i, 2.0 + 0.2 * static_cast<double>(i), 0, 0});
  return pauses;
}

SimulationOptions slow_link() {
  SimulationOptions options =
      box_of({1, 1, 0.25, 0.25}, 0.01, kScenarioSteps, {.reduction_seconds = {0.0, 0.0, 0.001, 0.004, 0.008}});
  options.batch_size = 128;
  return options;
}

/// Two devices with the noise of two real cores (AMD EPYC, nobody else, 1,950 steps): seconds per item vary by 13 %,
/// correlated by 0.66, 0.41, 0.31 and 0.21 at lags 1, 5, 20 and 100, most of which both cores share; their log ratio
/// by 0.36, 0.27, 0.13 and 0.03 at lags 1, 2, 5 and 10.
SimulationOptions two_real_cores(std::vector<Throttle> throttles) {
  return box_of({1, 1}, 0.069, kScenarioSteps,
                {.lasting_noise = {{0.0655, 3.64, false}, {0.0465, 3, true}, {0.051, 40, true}, {0.062, 1000, true}},
                 .throttles = std::move(throttles)});
}

// Following each burst at once would lose 1.6 % here instead of 3.6 %, with 7.8 moves in 100 steps. On real cores,
// whose times vary by more than such a burst, that was slower than even shares.
SimulationOptions bursts() {
  SimulationOptions options = box_of({1, 1}, 0.01, 1600);
  for (std::size_t i = 0; i < 2; ++i) {
    plan::Random random(1, 0, i);
    const auto steps = [&](double mean) {
      return static_cast<std::int64_t>(std::ceil(-mean * std::log(1.0 - random.uniform())));
    };
    for (std::int64_t from = steps(40.0); from < options.steps;) {
      const std::int64_t to = from + steps(8.0);
      options.box.throttles.push_back({i, 1.2, from, to});
      from = to + steps(40.0);
    }
  }
  return options;
}

std::vector<Drift> random_walks() {
  constexpr std::int64_t kSegment = 50;
  std::vector<Drift> drifts;
  for (std::size_t i = 0; i < 8; ++i) {
    for (std::int64_t from = 0; from < kScenarioSteps; from += kSegment) {
      plan::Random random(1, static_cast<std::uint64_t>(from), i);
      drifts.push_back({i, 1.0, std::exp(0.03 * random.normal()), from, from + kSegment});
    }
  }
  return drifts;
}

}  // namespace

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  const auto add = [&](const char* name, const char* about, SimulationOptions options, double most_regret,
                       double most_moves_per_100_steps, std::int64_t most_steps_to_recover = 0) {
    all.push_back({name, about, std::move(options), most_regret, most_moves_per_100_steps, most_steps_to_recover});
  };
  add("quiet", "eight equal devices, 0.5 % noise: steady shapes on a machine that does nothing else",
      eight({}, 0.005, 400), 0.0035, 0.5);
  // Rebalancing on noise is what naive rules lose by: the smallest of many noisy candidates always promises a gain.
  add("noise", "eight equal devices, 5 % noise: what variable lengths do to times", eight({}, 0.05, 400), 0.0035, 0.5);
  add("static mix", "four devices and four of half their speed, all of one class",
      box_of({1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5}, kNoise, kScenarioSteps), 0.01, 1.0);
  add("lasting throttle",
      "one device 2x slower for 400 of 800 steps, then as before: a GPU that overheats (Wu et al., USENIX ATC 2025, "
      "saw 1.5x to 2x for minutes)",
      eight({.throttles = {{kOdd, 2.0, 200, 600}}}), 0.005, 1.0, 2);
  add("flapping", "one device 1.5x slower in 4 of every 40 steps: shorter than a reaction pays for",
      eight({.throttles = repeated(1.5, 4, 40)}), 0.015, 6.0);
  add("costly moves",
      "the same where a device's first run of a size takes 0.1 s (ten steps' time) more: compilation, a captured graph",
      costly_moves(), 0.065, 0.5);
  add("late start",
      "one device begins 8 ms late (three quarters of a step) in 400 of 800 steps: other programs hold its core",
      eight({.late_starts = {{kOdd, 0.008, 200, 600}}}), 0.035, 2.5);
  add("drift", "one device slows down by half over 400 steps: heat, no step of which is an event",
      eight({.drifts = {{kOdd, 1.0, 1.5, 200, 600}}}), 0.015, 6.0);
  add("periodic neighbour", "another process on one device for 50 of every 100 steps, 2x slower then: a cron job",
      eight({.throttles = repeated(2.0, 50, 100, 50)}), 0.025, 6.0, 2);
  add("warm-up",
      "half of the devices start 1.6x slower and reach their speed over 40 steps: clocks, caches, allocators",
      eight({.drifts = warm_up()}, kNoise, 400), 0.025, 4.0);
  add("first-step compile",
      "every device's first step takes seconds, not equally many, and nobody says so: just-in-time compilation",
      eight({.pauses = first_steps()}, kNoise, 400), 0.005, 1.0);
  add("garbage collection",
      "one device stands still for 30 ms (three steps' time) every 70 steps: a collector in its thread",
      eight({.pauses = {{kOdd, 0.030, 70, 70}}}), 0.0035, 0.5);
  add("one bad sample", "one step of one device takes ten times as long, once",
      eight({.pauses = {{kOdd, 0.100, 150, 0}}}, kNoise, 400), 0.0035, 0.5);
  add("a subset wins: a device too slow",
      "one of eight devices is so busy that its fixed time alone is longer than the others' step: seven are best",
      box_of({1, 1, 1, 1, 1, 1, 1, 0.02}, kNoise, kScenarioSteps), 0.12, 2.0);
  add("a subset wins: reductions",
      "two fast and two slow devices, the slow ones behind a slow link: with them the reduction costs more than they "
      "bring",
      slow_link(), 0.02, 2.0);
  add("correlated",
      "two equal devices with the noise of two quiet cores: 13 %, of which half is common to both, and much of which "
      "outlasts a step",
      two_real_cores({}), 0.0035, 1.0);
  // Two steps to recover in the median of 40 seeds; two samples of such noise tell the ratio to 11 % only.
  add("correlated, throttled",
      "the same two devices, one 2x slower for 400 of 800 steps: a busy neighbour beside noise that lasts",
      two_real_cores({{1, 2.0, 200, 600}}), 0.02, 2.0, 5);
  add("bursts", "two equal devices, each 1.2x slower for 8 steps of every 48 in the mean: neighbours on a shared host",
      bursts(), 0.03, 1.25);
  add("drifting",
      "eight devices whose speeds walk at random, 3 % in 50 steps each: heat and what else the machine does",
      eight({.drifts = random_walks()}), 0.0275, 6.0);
  add("failure", "one device stops for good", eight({.failures = {{kOdd, 200}}}, kNoise, 400), 0.0035, 1.0);
  return all;
}

}  // namespace paceline::sim
