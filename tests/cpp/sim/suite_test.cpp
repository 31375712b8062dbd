// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/scenario.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "correlation.hpp"
#include "errors.hpp"

namespace paceline::sim {

void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

namespace {

class Suite : public testing::TestWithParam<Scenario> {};

TEST_P(Suite, KeepsItsBounds) {
  const ScenarioResult result = run_scenario(GetParam());
  EXPECT_EQ(result.missed, std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(AllScenarios, Suite, testing::ValuesIn(scenarios()), [](const auto& tested) {
  std::string name = tested.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
});

Scenario named(const std::string& name) {
  for (Scenario& scenario : scenarios()) {
    if (scenario.name == name) return scenario;
  }
  throw std::out_of_range(name);
}

TEST(ScenarioResult, SaysWhichBoundsWereMissed) {
  Scenario scenario = named("lasting throttle");
  scenario.most_regret = 0.0;
  scenario.most_moves_per_100_steps = 0.0;
  scenario.most_steps_to_recover = 1;
  scenario.options.box.throttles[0].factor = 1.3;  // a larger change is followed in the next step
  EXPECT_EQ(run_scenario(scenario, 1).missed.size(), 3u);
  scenario.options.policy = Balance::even;
  scenario.most_regret = 1.0;
  const ScenarioResult even = run_scenario(scenario, 1);
  ASSERT_EQ(even.missed.size(), 1u);
  EXPECT_TRUE(says(even.missed[0], "never ended"));
  EXPECT_THROW((void)run_scenario(scenario, 0), InvalidArgument);
}

TEST(Scenarios, CorrelatedNoiseIsThatOfTwoRealCores) {
  Box box(named("correlated").options.box);
  std::vector<double> first;
  std::vector<double> ratio;
  for (std::int64_t step = 0; step < 60000; ++step) {
    const balance::StepTimings timings = box.run(step, {256, 256}).timings;
    first.push_back(std::log(timings.devices[0][0].seconds));
    ratio.push_back(first.back() - std::log(timings.devices[1][0].seconds));
  }
  const auto measured = std::vector<std::pair<std::size_t, double>>{{1, 0.64}, {5, 0.42}, {20, 0.28}, {100, 0.20}};
  for (const auto& [lag, expected] : measured) EXPECT_NEAR(correlation(first, lag), expected, 0.06) << lag;
  const auto between = std::vector<std::pair<std::size_t, double>>{{1, 0.36}, {2, 0.27}, {5, 0.13}, {10, 0.03}};
  for (const auto& [lag, expected] : between) EXPECT_NEAR(correlation(ratio, lag), expected, 0.04) << lag;
}

TEST(Scenarios, HaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const Scenario& scenario : scenarios()) names.insert(scenario.name);
  EXPECT_EQ(names.size(), scenarios().size());
}

TEST(Optimum, OfAStepChangeIsOneLateStepForEachEdge) {
  SimulationOptions options = named("quiet").options;
  options.steps = 100;
  options.box.throttles = {{3, 2.0, 40, 60}};
  const Box box(options.box);
  const double down = box.makespan(40, box.best_split(39, 512)) / box.ideal(40, 512) - 1.0;
  const double up = box.makespan(60, box.best_split(59, 512)) / box.ideal(60, 512) - 1.0;
  EXPECT_NEAR(optimum(options).loss, (down + up) / 100.0, 1e-12);
}

TEST(Optimum, DoesNotFollowWhatIsGoneBeforeTheNextStep) {
  SimulationOptions options = named("quiet").options;
  options.steps = 100;
  for (std::int64_t k = 1; k < 100; k += 2) options.box.throttles.push_back({3, 1.2, k, k + 1});
  const Optimum found = optimum(options);
  EXPECT_TRUE(says(found.source, "single split"));
  const Box box(options.box);
  const double late = box.makespan(1, box.best_split(0, 512)) / box.ideal(1, 512) - 1.0 +
                      box.makespan(2, box.best_split(1, 512)) / box.ideal(2, 512) - 1.0;
  EXPECT_LT(found.loss, late / 2.0);
}

TEST(Optimum, OfAFailureIsNothing) {
  SimulationOptions options = named("failure").options;
  EXPECT_EQ(optimum(options).loss, 0.0);
}

}  // namespace
}  // namespace paceline::sim
