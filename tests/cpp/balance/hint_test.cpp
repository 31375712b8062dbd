// SPDX-License-Identifier: Apache-2.0
//
// Balancers that begin with what an earlier run measured.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;
using Models = std::vector<std::optional<plan::CostModel>>;

BalancerOptions of_classes(const std::vector<std::string>& classes, Balance policy = Balance::automatic) {
  BalancerOptions options;
  options.policy = policy;
  for (std::size_t i = 0; i < classes.size(); ++i) options.devices.push_back({std::to_string(i), classes[i], {}});
  return options;
}

/// One step in which a device takes 1 ms for each of its items, divided by its speed. Returns the plan's shares.
Shares step(Balancer& balancer, const std::vector<double>& speeds, std::int64_t batch_size = 600) {
  const StepPlan plan = balancer.next_plan(batch_size);
  StepTimings timings;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    auto& runs = timings.devices.emplace_back();
    if (plan.shares[i] > 0) runs.push_back({plan.shares[i], 0.001 * static_cast<double>(plan.shares[i]) / speeds[i]});
  }
  balancer.record(timings);
  return plan.shares;
}

Models models(const std::vector<double>& speeds) {
  Models made;
  for (const double speed : speeds) made.emplace_back(plan::CostModel::affine(0.0, 0.001 / speed));
  return made;
}

TEST(Hint, GivesTheFirstPlanTheSharesOfAnEarlierRun) {
  const std::vector<double> speeds = {1.0, 2.0, 3.0};
  Balancer earlier(of_classes({"host", "host", "host"}));
  Shares learned;
  for (int k = 0; k < 60; ++k) learned = step(earlier, speeds);
  Models measured;
  for (const DeviceReport& device : earlier.report().devices) {
    measured.emplace_back(plan::CostModel::affine(device.fixed_seconds, device.per_item_seconds));
  }
  Balancer later(of_classes({"host", "host", "host"}));
  later.hint(measured);
  for (int k = 0; k < 20; ++k) {
    const Shares shares = step(later, speeds);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_LE(std::abs(shares[i] - learned[i]), 6) << k;
  }
}

TEST(Hint, IsCorrectedWhereItIsWrong) {
  Balancer balancer(of_classes({"host", "host", "host"}));
  balancer.hint(models({1.0, 1.0, 4.0}));
  EXPECT_EQ(step(balancer, {2.0, 2.0, 1.0}), (Shares{100, 100, 400}));
  Shares shares;
  for (int k = 0; k < 30; ++k) shares = step(balancer, {2.0, 2.0, 1.0});
  const Shares right = {240, 240, 120};
  for (std::size_t i = 0; i < 3; ++i) EXPECT_LE(std::abs(shares[i] - right[i]), 6);
}

TEST(Hint, IsCorrectedWhereItsSharesAreExtreme) {
  Balancer balancer(of_classes({"host", "host"}));
  balancer.hint(models({1.0, 15.0}));
  EXPECT_EQ(step(balancer, {3.0, 1.0}, 48), (Shares{3, 45}));
  Shares shares;
  for (int k = 0; k < 16; ++k) shares = step(balancer, {3.0, 1.0}, 48);
  EXPECT_LE(std::abs(shares[0] - 36), 2) << balancer.explain();
}

TEST(Hint, OfAnotherFixedPartIsCorrected) {
  Balancer balancer(of_classes({"host", "host"}));
  balancer.hint({{plan::CostModel::affine(0.0, 0.001), plan::CostModel::affine(0.0, 0.002)}});
  Shares shares;
  for (int k = 0; k < 60; ++k) {  // 100 ms + 1 ms for each item, and twice that
    shares = balancer.next_plan(600).shares;
    const auto seconds = [&](std::size_t i) {
      return (0.1 + 0.001 * static_cast<double>(shares[i])) * (i == 0 ? 1.0 : 2.0);
    };
    balancer.record({.devices = {{{shares[0], seconds(0)}}, {{shares[1], seconds(1)}}}});
  }
  EXPECT_LE(std::abs(shares[0] - 433), 6) << balancer.explain();
}

TEST(Hint, DoesNotKeepADeviceWithoutWorkForGood) {
  for (const double slowness : {1.0, 100.0}) {
    Balancer balancer(of_classes({"host", "host", "host"}));
    balancer.hint({{plan::CostModel::affine(0.002, 0.0001), plan::CostModel::affine(0.002, 0.0001),
                    plan::CostModel::affine(0.2, 0.01)}});
    Shares shares;
    for (int k = 0; k < 10; ++k) {
      shares = balancer.next_plan(90).shares;
      EXPECT_TRUE(k > 0 || shares == (Shares{45, 45, 0}));
      StepTimings timings;
      for (std::size_t i = 0; i < 3; ++i) {
        auto& runs = timings.devices.emplace_back();
        const double seconds = (0.002 + 0.0001 * static_cast<double>(shares[i])) * (i == 2 ? slowness : 1.0);
        if (shares[i] > 0) runs.push_back({shares[i], seconds});
      }
      balancer.record(timings);
    }
    EXPECT_LE(std::abs(shares[2] - (slowness > 1.0 ? 0 : 30)), 2) << balancer.explain();
  }
}

TEST(Hint, CountsADeviceThatItLacksAsFastAsTheFastestOfItsClassOrElseOfAll) {
  Balancer balancer(of_classes({"a", "a", "a", "b", "c"}));
  Models hints = models({1.0, 2.0, 1.0, 4.0, 1.0});
  hints[2] = hints[4] = std::nullopt;
  balancer.hint(hints);
  EXPECT_EQ(balancer.next_plan(130).shares, (Shares{10, 20, 20, 40, 40}));
}

TEST(Hint, DoesNothingForFixedSharesAndAfterTheFirstTiming) {
  Balancer even(of_classes({"host", "host"}, Balance::even));
  even.hint(models({1.0, 3.0}));
  EXPECT_EQ(even.next_plan(80).shares, (Shares{40, 40}));

  std::ostringstream ledger;
  Balancer measured(of_classes({"host", "host"}));
  measured.write_to(std::make_shared<LedgerWriter>(ledger));
  for (int k = 0; k < 10; ++k) step(measured, {1.0, 1.0}, 80);
  const std::string before = ledger.str();
  measured.hint(models({1.0, 3.0}));
  EXPECT_EQ(ledger.str(), before);
  EXPECT_EQ(measured.next_plan(80).shares, (Shares{40, 40}));

  Balancer unknown(of_classes({"host", "host"}));
  unknown.hint(models({1.0, 3.0}));
  unknown.hint({{std::nullopt, std::nullopt}});
  EXPECT_EQ(unknown.next_plan(80).shares, (Shares{20, 60}));
  EXPECT_THROW(unknown.hint(models({1.0})), InvalidArgument);
}

TEST(Hint, HoldsForThePlanThatWasMadeBeforeItAndForDevicesThatWork) {
  Balancer balancer(of_classes({"host", "host", "host"}));
  balancer.next_plan(60);  // of a step that failed
  balancer.hint(models({1.0, 1.0, 4.0}));
  EXPECT_EQ(balancer.next_plan(60).shares, (Shares{10, 10, 40}));
  balancer.retire(1);
  EXPECT_EQ(balancer.next_plan(60).shares, (Shares{12, 0, 48}));
}

}  // namespace
}  // namespace paceline::balance
