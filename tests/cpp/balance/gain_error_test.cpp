// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>
#include <paceline/sim/random.hpp>

#include "balance/target.hpp"

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

// Each device is a class of its own, because devices of one class share what is known about them.
std::vector<DeviceProfile> even_profiles(std::size_t count) {
  std::vector<DeviceProfile> out;
  for (std::size_t i = 0; i < count; ++i) {
    out.push_back({"sim:" + std::to_string(i), "class " + std::to_string(i), {}});
  }
  return out;
}

BalancerOptions options_for(std::size_t count) {
  BalancerOptions options;
  options.devices = even_profiles(count);
  return options;
}

/// Devices that ran the same shares in every step, with independent noise.
struct Known {
  BalancerOptions options;
  Estimator estimator;
  StartupCost startup;
  SizeHistory sizes;
  std::vector<plan::ShareLimits> limits;
  std::vector<double> no_reduction;

  explicit Known(std::size_t count)
      : options(options_for(count)),
        estimator(options.devices),
        startup(std::vector<double>(count, 0.0)),
        sizes(std::vector<std::size_t>(count, 0)),
        limits(count) {}

  void run(int steps, const Shares& shares, const std::vector<double>& per_item, double noise, std::uint64_t seed) {
    for (std::int64_t step = 0; step < steps; ++step) {
      StepTimings timings;
      for (std::size_t i = 0; i < shares.size(); ++i) {
        sim::Random random(seed, static_cast<std::uint64_t>(step), i);
        const double seconds = per_item[i] * static_cast<double>(shares[i]) * std::exp(noise * random.normal());
        timings.devices.push_back({{shares[i], seconds}});
      }
      estimator.record(step, timings);
    }
  }

  [[nodiscard]] PolicyContext context() const {
    return {.options = options,
            .estimator = estimator,
            .startup = startup,
            .sizes = sizes,
            .limits = limits,
            .reduction_seconds = no_reduction};
  }
};

TEST(GainError, WeighsTheDeviceThatIsWaitedForAgainstTheAverageOfAll) {
  // Rates of 20, 20 and 10 items per millisecond: two, two and one fifths of the whole. The step waits for the third
  // one.
  Known known(3);
  known.run(20, {100, 100, 100}, {5e-5, 5e-5, 1e-4}, 0.03, 1);
  const PolicyContext context = known.context();
  const std::vector<plan::CostModel> models = {plan::CostModel::affine(0.0, 5e-5), plan::CostModel::affine(0.0, 5e-5),
                                               plan::CostModel::affine(0.0, 1e-4)};
  const auto error = [&](std::size_t device) { return known.estimator.error_at(device, 100.0); };
  const double by_hand =
      std::sqrt(std::pow(0.4 * error(0), 2) + std::pow(0.4 * error(1), 2) + std::pow(0.8 * error(2), 2));
  EXPECT_NEAR(gain_error(context, models, {100, 100, 100}, {120, 120, 60}), by_hand, 1e-12);
  // Without the second one, the rates are two thirds and one third of the whole.
  EXPECT_NEAR(
      gain_error(context, models, {150, 0, 150}, {200, 0, 100}),
      std::hypot(2.0 / 3.0 * known.estimator.error_at(0, 150.0), 2.0 / 3.0 * known.estimator.error_at(2, 150.0)),
      1e-12);
}

TEST(GainError, KeepsNoiseFromMovingTheSharesOfEqualDevices) {
  int moves = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    sim::BoxOptions box_options;
    box_options.noise = 0.1;
    box_options.seed = seed;
    BalancerOptions options = options_for(2);
    options.calibrate = false;
    for (const DeviceProfile& device : options.devices) {
      box_options.devices.push_back({.name = device.name, .device_class = device.device_class});
    }
    sim::Box box(box_options);
    Balancer balancer(options);
    for (std::int64_t step = 0; step < 60; ++step)
      balancer.record(box.run(step, balancer.next_plan(2000).shares).timings);
    moves += static_cast<int>(balancer.move_count());
  }
  EXPECT_LE(moves, 90) << "46 were seen; with half the error it takes for granted there were 153";
}

}  // namespace
}  // namespace paceline::balance
