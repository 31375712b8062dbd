// SPDX-License-Identifier: Apache-2.0
//
// A StepLoop and its ledger, where steps with costs and steps without take turns.
#include <paceline/engine/step_loop.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
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

void run(StepLoop& step_loop, const std::shared_ptr<Step>& step) {
  step->wait();
  step->rethrow_failure();
  step_loop.commit(step);
}

void step(StepLoop& step_loop, bool costs) {
  const auto program = std::make_shared<Nothing>();
  run(step_loop, step_loop.begin(costs ? step_loop.plan(kCosts) : step_loop.plan(8), program));
}

/// A StepLoop with its ledger in memory.
struct Recorded {
  std::ostringstream out;
  StepLoop step_loop{host_group(2), {}};

  Recorded() { step_loop.write_to(std::make_shared<balance::LedgerWriter>(out)); }

  [[nodiscard]] int lines_with(const std::string& what) const {
    std::istringstream lines(out.str());
    int count = 0;
    for (std::string line; std::getline(lines, line);) count += line.find(what) != std::string::npos ? 1 : 0;
    return count;
  }
};

TEST(StepLoopLedger, IsRefusedOnceAStepOfEitherKindWasPlanned) {
  for (const bool costs : {false, true}) {
    std::ostringstream out;
    StepLoop step_loop(host_group(2), {});
    step(step_loop, costs);
    EXPECT_THROW(step_loop.write_to(std::make_shared<balance::LedgerWriter>(out)), InvalidArgument) << costs;
    EXPECT_EQ(out.str(), "");
    step(step_loop, !costs);
    EXPECT_EQ(out.str(), "");
  }
}

TEST(StepLoopLedger, HasTheCallsOfBothKindsAndTellsThemApart) {
  for (const bool costs : {false, true}) {
    Recorded recorded;
    for (int k = 0; k < 3; ++k) step(recorded.step_loop, costs);
    for (int k = 0; k < 2; ++k) step(recorded.step_loop, !costs);
    step(recorded.step_loop, costs);
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

TEST(StepLoopLedger, IsOfStepsWithoutCostsIfCostsWereOnlyRefused) {
  Recorded recorded;
  EXPECT_THROW((void)recorded.step_loop.plan(std::vector<double>{-1.0}), InvalidArgument);
  for (int k = 0; k < 2; ++k) step(recorded.step_loop, false);
  EXPECT_EQ(recorded.lines_with(R"({"record")"), 2);
  EXPECT_EQ(recorded.lines_with("balancer"), 0);
}

TEST(StepLoop, JudgesStepsOfAKindByPlansOfThatKind) {
  StepLoop step_loop(host_group(2), {});
  for (int k = 0; k < 6; ++k) step(step_loop, k % 2 == 0);
  EXPECT_EQ(step_loop.balancer().report().steps, 3);
  step(step_loop, true);
  EXPECT_EQ(step_loop.balancer().report().steps, 4);
  EXPECT_EQ(step_loop.metrics().steps, 7);
}

TEST(StepLoop, RefusesAPlanThatIsNotTheLast) {
  StepLoop step_loop(host_group(2), {});
  const auto old = step_loop.plan(8);
  EXPECT_EQ(old->shares, old->balance.shares);
  const auto fresh = step_loop.plan(kCosts);
  EXPECT_THROW((void)step_loop.begin(old, std::make_shared<Nothing>()), InvalidArgument);
  EXPECT_THROW((void)step_loop.begin(nullptr, std::make_shared<Nothing>()), InvalidArgument);
  run(step_loop, step_loop.begin(fresh, std::make_shared<Nothing>()));
  step_loop.retire(0);
  EXPECT_THROW((void)step_loop.begin(fresh, std::make_shared<Nothing>()), InvalidArgument);
}

TEST(StepLoop, IsAsItWasAfterCostsThatWereRefused) {
  StepLoop step_loop(host_group(2), {});
  for (int k = 0; k < 3; ++k) step(step_loop, false);
  const balance::StepPlan before = step_loop.last_plan();
  EXPECT_THROW((void)step_loop.plan(std::vector<double>{1.0, std::nan("")}), InvalidArgument);
  EXPECT_FALSE(step_loop.by_cost());
  EXPECT_FALSE(step_loop.item_report());
  EXPECT_EQ(step_loop.last_plan().step, before.step);
  EXPECT_EQ(step_loop.last_plan().shares, before.shares);
}

TEST(StepLoopLedger, HasWhatLeftAndCameBack) {
  Recorded recorded;
  recorded.step_loop.retire(1);
  step(recorded.step_loop, false);
  recorded.step_loop.restore(1);
  for (int k = 0; k < 3; ++k) step(recorded.step_loop, false);
  EXPECT_EQ(recorded.lines_with(R"({"retire")"), 1);
  EXPECT_EQ(recorded.lines_with(R"({"restore")"), 1);
}

TEST(StepLoop, GivesADeviceThatIsRetiredNothingOfEitherKind) {
  StepLoop step_loop(host_group(3), {.balance = Balance::even});
  const auto ran = [&](bool costs) {
    const auto program = std::make_shared<Nothing>();
    const auto plan = costs ? step_loop.plan(std::vector<double>(12, 1.0)) : step_loop.plan(12);
    const auto running = step_loop.begin(plan, program);
    run(step_loop, running);
    return running->items();
  };
  ran(false);
  step_loop.retire(1);
  EXPECT_TRUE(step_loop.retired(1));
  EXPECT_TRUE(step_loop.metrics().devices[1].retired);
  for (const bool costs : {false, true, false, true}) {
    const std::vector<std::int64_t> items = ran(costs);
    EXPECT_EQ(items[1], 0) << costs;
    EXPECT_EQ(items[0] + items[2], 12) << "no item is lost";
  }
  step_loop.restore(1);
  EXPECT_FALSE(step_loop.retired(1));
  EXPECT_FALSE(step_loop.metrics().devices[1].retired);
  for (const bool costs : {false, true}) {
    ran(costs);
    EXPECT_GT(step_loop.last_plan().shares[1], 0) << costs;
  }
  step_loop.retire(0);
  step_loop.retire(1);
  EXPECT_THROW(step_loop.retire(2), InvalidArgument);
  EXPECT_THROW(step_loop.retire(3), InvalidArgument);
}

TEST(StepLoop, BeginsWithTheSpeedsOfAnEarlierRun) {
  StepLoop earlier(host_group(2), {});
  for (const std::optional<plan::CostModel>& speed : earlier.speeds()) EXPECT_FALSE(speed);
  const std::vector<std::optional<plan::CostModel>> speeds = {plan::CostModel::affine(0.0, 0.003),
                                                              plan::CostModel::affine(0.0, 0.001)};
  Recorded later;
  later.step_loop.hint(speeds, true);
  EXPECT_NE(later.step_loop.plan(8)->shares, (std::vector<std::int64_t>{2, 6})) << "it was for steps with costs";
  EXPECT_EQ(later.step_loop.plan(std::vector<double>(8, 1.0))->shares, (std::vector<std::int64_t>{2, 6}));
  later.step_loop.hint(speeds);
  EXPECT_EQ(later.step_loop.plan(8)->shares, (std::vector<std::int64_t>{2, 6}));
  EXPECT_EQ(later.lines_with(R"({"hint": [[0, 0.003], [0, 0.001]]})"), 1);
  EXPECT_EQ(later.lines_with(R"({"balancer": 1, "hint": [[0, 0.003], [0, 0.001]]})"), 1);
  for (int k = 0; k < 4; ++k) step(later.step_loop, false);
  const auto measured = later.step_loop.speeds();
  EXPECT_TRUE(measured[0] || measured[1]);
  for (const std::optional<plan::CostModel>& speed : later.step_loop.speeds(true)) EXPECT_FALSE(speed);
}

TEST(StepLoopLedger, EndsForBothKinds) {
  Recorded recorded;
  step(recorded.step_loop, true);
  const std::string written = recorded.out.str();
  recorded.step_loop.write_to(nullptr);
  for (const bool costs : {true, false}) step(recorded.step_loop, costs);
  EXPECT_EQ(recorded.out.str(), written);
}

}  // namespace
}  // namespace paceline
