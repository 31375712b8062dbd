// SPDX-License-Identifier: Apache-2.0
//
// The ledger of a stepper whose steps with costs and steps without costs alternate: which calls it holds.
#include <paceline/engine/stepper.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <string>
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
  run(stepper, costs ? stepper.begin(stepper.plan_items(kCosts), program) : stepper.begin(8, program));
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

TEST(StepperLedger, HasTheCallsOfTheKindThatRanFirstAndMarksWhatRanOfTheOther) {
  for (const bool costs : {false, true}) {
    Recorded recorded;
    for (int k = 0; k < 3; ++k) step(recorded.stepper, costs);
    for (int k = 0; k < 2; ++k) step(recorded.stepper, !costs);
    step(recorded.stepper, costs);
    EXPECT_EQ(recorded.lines_with(R"({"claims")"), 6);
    EXPECT_EQ(recorded.lines_with(R"("decided_here": false)"), 2);
    const std::string others =
        costs ? R"("batch_size": 8, "decided_here": false)" : R"("batch_size": 4, "decided_here": false)";
    EXPECT_EQ(recorded.lines_with(others), 2);
    EXPECT_EQ(recorded.lines_with(R"({"plan")"), 4);
    EXPECT_EQ(recorded.lines_with(R"({"record")"), 4);
  }
}

TEST(StepperLedger, IsOfStepsWithoutCostsIfCostsWereOnlyRefused) {
  Recorded recorded;
  EXPECT_THROW((void)recorded.stepper.plan_items(std::vector<double>{-1.0}), InvalidArgument);
  for (int k = 0; k < 2; ++k) step(recorded.stepper, false);
  EXPECT_EQ(recorded.lines_with(R"({"record")"), 2);
  EXPECT_EQ(recorded.lines_with("decided_here"), 0);
}

TEST(Stepper, IsAsItWasAfterCostsThatWereRefused) {
  Stepper stepper(host_group(2), {});
  for (int k = 0; k < 3; ++k) step(stepper, false);
  const balance::StepPlan before = stepper.plan();
  EXPECT_THROW((void)stepper.plan_items(std::vector<double>{1.0, std::nan("")}), InvalidArgument);
  EXPECT_FALSE(stepper.by_cost());
  EXPECT_FALSE(stepper.item_report());
  EXPECT_EQ(stepper.plan().step, before.step);
  EXPECT_EQ(stepper.plan().shares, before.shares);
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
    const auto running =
        costs ? stepper.begin(stepper.plan_items(std::vector<double>(12, 1.0)), program) : stepper.begin(12, program);
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
    EXPECT_GT(stepper.plan().shares[1], 0) << costs;
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
