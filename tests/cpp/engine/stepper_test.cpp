// SPDX-License-Identifier: Apache-2.0
//
// A stepper and its ledger, where steps with costs and steps without take turns.
#include <paceline/engine/stepper.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>

#include "host_group.hpp"

namespace paceline {
namespace {

const std::vector<double> kCosts = {3.0, 1.0, 2.0, 2.0};

class Nothing final : public StepProgram {
 public:
  bool run(const MicroBatch&) override { return false; }
};

void run(Stepper& stepper, const std::shared_ptr<Step>& step) {
  step->wait();
  step->rethrow_failure();
  stepper.commit(step);
}

void step(Stepper& stepper, bool costs) {
  const auto program = std::make_shared<Nothing>();
  run(stepper, stepper.begin(costs ? stepper.plan(kCosts) : stepper.plan(8), program));
}

/// A stepper with its ledger in memory.
struct Recorded {
  std::ostringstream out;
  Stepper stepper{host_group(2), {}};

  Recorded() { stepper.write_to(std::make_shared<balance::LedgerWriter>(out)); }

  [[nodiscard]] int lines_with(const std::string& what) const {
    std::istringstream lines(out.str());
    int count = 0;
    for (std::string line; std::getline(lines, line);) count += line.find(what) != std::string::npos ? 1 : 0;
    return count;
  }
};

TEST(StepperLedger, IsRefusedOnceAStepOfEitherKindWasPlanned) {
  for (const bool costs : {false, true}) {
    std::ostringstream out;
    Stepper stepper(host_group(2), {});
    step(stepper, costs);
    EXPECT_THROW(stepper.write_to(std::make_shared<balance::LedgerWriter>(out)), InvalidArgument) << costs;
    EXPECT_EQ(out.str(), "");
    step(stepper, !costs);
    EXPECT_EQ(out.str(), "");
  }
}

TEST(StepperLedger, HasTheCallsOfBothKindsAndTellsThemApart) {
  for (const bool costs : {false, true}) {
    Recorded recorded;
    for (int k = 0; k < 3; ++k) step(recorded.stepper, costs);
    for (int k = 0; k < 2; ++k) step(recorded.stepper, !costs);
    step(recorded.stepper, costs);
    const std::string first = "{";
    const std::string second = R"({"balancer": 1, )";
    const std::string batch_of_first = costs ? R"("batch_size": 4, "ran")" : R"("batch_size": 8, "ran")";
    const std::string batch_of_second = costs ? R"("batch_size": 8, "ran")" : R"("batch_size": 4, "ran")";
    EXPECT_EQ(recorded.lines_with(batch_of_first), 4);
    EXPECT_EQ(recorded.lines_with(batch_of_second), 2);
    for (const auto& [kind, steps] : {std::pair(first, 4), std::pair(second, 2)}) {
      for (const char* const call : {"plan", "record", "claims"}) {
        EXPECT_EQ(recorded.lines_with(kind + '"' + call + '"'), steps) << kind << call;
      }
      EXPECT_EQ(recorded.lines_with(kind + R"("paceline_ledger")"), 1);
    }
  }
}

TEST(StepperLedger, IsOfStepsWithoutCostsIfCostsWereOnlyRefused) {
  Recorded recorded;
  EXPECT_THROW((void)recorded.stepper.plan(std::vector<double>{-1.0}), InvalidArgument);
  for (int k = 0; k < 2; ++k) step(recorded.stepper, false);
  EXPECT_EQ(recorded.lines_with(R"({"record")"), 2);
  EXPECT_EQ(recorded.lines_with("balancer"), 0);
}

TEST(Stepper, JudgesStepsOfAKindByPlansOfThatKind) {
  Stepper stepper(host_group(2), {});
  for (int k = 0; k < 6; ++k) step(stepper, k % 2 == 0);
  EXPECT_EQ(stepper.balancer().report().steps, 3);
  step(stepper, true);
  EXPECT_EQ(stepper.balancer().report().steps, 4);
  EXPECT_EQ(stepper.metrics().steps, 7);
}

TEST(Stepper, RefusesAPlanThatIsNotTheLast) {
  Stepper stepper(host_group(2), {});
  const auto old = stepper.plan(8);
  EXPECT_EQ(old->shares, old->balance.shares);
  const auto fresh = stepper.plan(kCosts);
  EXPECT_THROW((void)stepper.begin(old, std::make_shared<Nothing>()), InvalidArgument);
  EXPECT_THROW((void)stepper.begin(nullptr, std::make_shared<Nothing>()), InvalidArgument);
  run(stepper, stepper.begin(fresh, std::make_shared<Nothing>()));
  stepper.retire(0);
  EXPECT_THROW((void)stepper.begin(fresh, std::make_shared<Nothing>()), InvalidArgument);
}

TEST(Stepper, IsAsItWasAfterCostsThatWereRefused) {
  Stepper stepper(host_group(2), {});
  for (int k = 0; k < 3; ++k) step(stepper, false);
  const balance::StepPlan before = stepper.last_plan();
  EXPECT_THROW((void)stepper.plan(std::vector<double>{1.0, std::nan("")}), InvalidArgument);
  EXPECT_FALSE(stepper.by_cost());
  EXPECT_FALSE(stepper.item_report());
  EXPECT_EQ(stepper.last_plan().step, before.step);
  EXPECT_EQ(stepper.last_plan().shares, before.shares);
}

TEST(StepperLedger, HasWhatLeftAndCameBack) {
  Recorded recorded;
  recorded.stepper.retire(1);
  step(recorded.stepper, false);
  recorded.stepper.restore(1);
  for (int k = 0; k < 3; ++k) step(recorded.stepper, false);
  EXPECT_EQ(recorded.lines_with(R"({"retire")"), 1);
  EXPECT_EQ(recorded.lines_with(R"({"restore")"), 1);
}

TEST(Stepper, GivesADeviceThatIsRetiredNothingOfEitherKind) {
  Stepper stepper(host_group(3), {});
  const auto ran = [&](bool costs) {
    const auto program = std::make_shared<Nothing>();
    const auto plan = costs ? stepper.plan(std::vector<double>(12, 1.0)) : stepper.plan(12);
    const auto running = stepper.begin(plan, program);
    run(stepper, running);
    return running->items();
  };
  ran(false);
  stepper.retire(1);
  EXPECT_TRUE(stepper.retired(1));
  for (const bool costs : {false, true, false, true}) {
    const std::vector<std::int64_t> items = ran(costs);
    EXPECT_EQ(items[1], 0) << costs;
    EXPECT_EQ(items[0] + items[2], 12) << "no item is lost";
  }
  stepper.restore(1);
  EXPECT_FALSE(stepper.retired(1));
  for (const bool costs : {false, true}) {
    ran(costs);
    EXPECT_GT(stepper.last_plan().shares[1], 0) << costs;
  }
  stepper.retire(0);
  stepper.retire(1);
  EXPECT_THROW(stepper.retire(2), InvalidArgument);
  EXPECT_THROW(stepper.retire(3), InvalidArgument);
}

TEST(StepperLedger, EndsForBothKinds) {
  Recorded recorded;
  step(recorded.stepper, true);
  const std::string written = recorded.out.str();
  recorded.stepper.write_to(nullptr);
  for (const bool costs : {true, false}) step(recorded.stepper, costs);
  EXPECT_EQ(recorded.out.str(), written);
}

}  // namespace
}  // namespace paceline
