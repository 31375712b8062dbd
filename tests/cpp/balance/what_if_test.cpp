// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <sstream>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>
#include <paceline/sim/box.hpp>

#include "errors.hpp"
#include "sim_box.hpp"

namespace paceline::balance {
namespace {

using testing::box_of;
using Shares = std::vector<std::int64_t>;

Balancer balancer_of(const sim::BoxOptions& box) { return Balancer(testing::options_for(box)); }

void run(Balancer& balancer, sim::Box& box, std::int64_t from, std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) {
    balancer.record(box.run(step, balancer.next_plan(400).shares).timings);
  }
}

double ideal(const std::vector<double>& speeds) { return sim::Box(box_of(speeds)).ideal(0, 400); }

TEST(WhatIf, AnswersAsABoxOfThoseDevicesWould) {
  sim::Box box(box_of({1.0, 1.0, 0.5}));
  Balancer balancer = balancer_of(box.options());
  run(balancer, box, 0, 30);
  EXPECT_NEAR(balancer.what_if({}).seconds, ideal({1.0, 1.0, 0.5}), 2e-4);
  EXPECT_NEAR(balancer.what_if({.speeds = {1.0, 1.0, 2.0}}).seconds, ideal({1.0, 1.0, 1.0}), 2e-4);
  EXPECT_NEAR(balancer.what_if({.remove = {2}}).seconds, ideal({1.0, 1.0}), 2e-4);
  EXPECT_EQ(balancer.what_if({.remove = {2}}).shares, (Shares{200, 200, 0}));
  const WhatIfAnswer more = balancer.what_if({.add = {{"new", 2, 2.0}}, .remove = {2}});
  EXPECT_NEAR(more.seconds, ideal({1.0, 1.0, 1.0}), 2e-4);
  EXPECT_EQ(more.names.back(), "new");
  EXPECT_EQ(more.shares[2], 0);
  EXPECT_TRUE(says(more.text, "shorter"));
}

TEST(WhatIf, CountsWhatDevicesWaitForEachOtherWhereSeveralWork) {
  sim::Box box(box_of({1.0, 1.0, 0.5}));
  Balancer balancer = balancer_of(box.options());
  Balancer prompt = balancer_of(box.options());
  for (std::int64_t step = 0; step < 30; ++step) {
    StepTimings timings = box.run(step, balancer.next_plan(400).shares).timings;
    (void)prompt.next_plan(400);
    prompt.record(timings);
    timings.step_seconds = step == 20 ? 9.0 : 1.5 * ideal({1.0, 1.0, 0.5});
    balancer.record(timings);
  }
  EXPECT_NEAR(balancer.what_if({}).seconds / prompt.what_if({}).seconds, 1.5, 0.01);
  EXPECT_NEAR(balancer.what_if({}).present_seconds / prompt.what_if({}).present_seconds, 1.5, 0.01);
  EXPECT_NEAR(balancer.what_if({}).best_seconds / prompt.what_if({}).best_seconds, 1.5, 0.01);
  EXPECT_NEAR(balancer.what_if({.remove = {2}}).seconds / prompt.what_if({.remove = {2}}).seconds, 1.5, 0.01);
  EXPECT_EQ(balancer.what_if({.remove = {1, 2}}).seconds, prompt.what_if({.remove = {1, 2}}).seconds);
  balancer.retire(2);
  (void)balancer.next_plan(400);
  EXPECT_NEAR(balancer.what_if({}).seconds, ideal({1.0, 1.0}), 2e-4) << "that was of other devices";
}

TEST(WhatIf, TouchesNothing) {
  sim::Box box(box_of({1.0, 0.5}));
  std::ostringstream asked;
  std::ostringstream silent;
  for (std::ostringstream* text : {&asked, &silent}) {
    sim::Box fresh(box.options());
    Balancer balancer = balancer_of(box.options());
    balancer.write_to(std::make_shared<LedgerWriter>(*text));
    run(balancer, fresh, 0, 20);
    if (text == &asked) (void)balancer.what_if({.speeds = {0.1, 3.0}, .remove = {0}});
    run(balancer, fresh, 20, 40);
  }
  EXPECT_EQ(asked.str(), silent.str());
}

TEST(WhatIf, RefusesWhatMakesNoSense) {
  sim::Box box(box_of({1.0, 0.5}));
  Balancer balancer = balancer_of(box.options());
  EXPECT_THROW((void)balancer.what_if({}), InvalidArgument);
  run(balancer, box, 0, 5);
  EXPECT_THROW((void)balancer.what_if({.speeds = {1.0}}), InvalidArgument);
  EXPECT_THROW((void)balancer.what_if({.speeds = {1.0, 0.0}}), InvalidArgument);
  EXPECT_THROW((void)balancer.what_if({.add = {{"x", 2, 1.0}}}), InvalidArgument);
  EXPECT_THROW((void)balancer.what_if({.remove = {2}}), InvalidArgument);
}

TEST(WhatIf, TakesDevicesToBeFasterTheFewerThereAreByWhatOneAloneHasShown) {
  sim::Box box(box_of({1.0, 1.0, 1.0}));
  Balancer balancer = balancer_of(box.options());
  run(balancer, box, 0, 30);
  const auto seconds = [&](const std::vector<std::size_t>& remove) {
    return balancer.what_if({.remove = remove, .alone = 0.25}).seconds / balancer.what_if({.remove = remove}).seconds;
  };
  EXPECT_NEAR(seconds({}), 1.0, 1e-9);
  EXPECT_NEAR(seconds({2}), 0.5, 1e-9);
  EXPECT_NEAR(seconds({0, 2}), 0.25, 1e-9);
  const WhatIfAnswer plain = balancer.what_if({.remove = {2}});
  const WhatIfAnswer whole = balancer.what_if({.remove = {2}, .alone = 1.0, .overhead_seconds = 0.1});
  EXPECT_NEAR(whole.seconds, plain.seconds + 0.1, 1e-9);
  EXPECT_NEAR(whole.present_seconds, plain.present_seconds + 0.1, 1e-9);
  EXPECT_NEAR(whole.best_seconds, plain.best_seconds + 0.1, 1e-9);
  EXPECT_TRUE(says(plain.text, "as fast alone as beside each other, which was not measured"));
  EXPECT_TRUE(says(whole.text, "it rests on steps that one device ran alone"));
  EXPECT_EQ(balancer.what_if({}).text.find("alone"), std::string::npos);
  EXPECT_THROW((void)balancer.what_if({.alone = 0.0}), InvalidArgument);
}

TEST(WhatIf, SaysWhichDevicesThereAreWhereNoneIsLeft) {
  sim::Box box(box_of({1.0, 0.5}));
  Balancer balancer = balancer_of(box.options());
  run(balancer, box, 0, 5);
  const auto refusal = [&](const WhatIfOptions& asked) -> std::string {
    try {
      return balancer.what_if(asked).text;
    } catch (const InvalidArgument& error) {
      return error.what();
    }
  };
  const std::string wanted =
      "what_if: remove leaves no device to run the batch; the devices are sim:0, sim:1. Leave one of them, or add one";
  EXPECT_EQ(refusal({.remove = {0, 1}}), wanted);
  EXPECT_EQ(balancer.what_if({.add = {{"new", 0, 1.0}}, .remove = {0, 1}}).shares, (Shares{0, 0, 400}));
  balancer.retire(0);
  (void)balancer.next_plan(400);
  EXPECT_EQ(refusal({.remove = {1}}), wanted);
}

TEST(Explain, NamesWhatBatchesCount) {
  sim::Box box(box_of({1.0, 0.5}));
  BalancerOptions options = testing::options_for(box.options());
  options.unit = "units of work";
  Balancer balancer(options);
  run(balancer, box, 0, 5);
  EXPECT_EQ(balancer.report().unit, "units of work");
  EXPECT_TRUE(says(balancer.explain(), "shares of a batch of 400 units of work, as planned"));
  EXPECT_TRUE(says(balancer.explain(), "does not depend on the number of units of work"));
  EXPECT_TRUE(says(balancer.what_if({}).text, "a step of 400 units of work would take"));
}

TEST(Explain, ShowsTheUsualBatchAndNotTheSmallLastOneOfAnEpoch) {
  sim::Box box(box_of({1.0, 0.5}));
  Balancer balancer = balancer_of(box.options());
  const auto step = [&](std::int64_t items) {
    balancer.record(box.run(balancer.report().steps, balancer.next_plan(items).shares).timings);
    return balancer.report().devices[0].share + balancer.report().devices[1].share;
  };
  EXPECT_EQ(step(400), 400);
  EXPECT_EQ(step(90), 90) << "no size came twice";
  EXPECT_EQ(step(90), 90);
  EXPECT_EQ(step(400), 400) << "the larger one of equals";
  EXPECT_EQ(step(400), 400);
  EXPECT_EQ(step(60), 400);
  EXPECT_TRUE(says(balancer.explain(), "shares of a batch of 400, as planned"));
  EXPECT_TRUE(says(balancer.what_if({}).text, "a step of 400 items would take"));
  for (int i = 0; i < 49; ++i) step(90);
  EXPECT_EQ(step(400), 90) << "sizes of 50 steps count";
  balancer.retire(1);
  EXPECT_EQ(step(60), 60) << "what other devices had is over";
  EXPECT_EQ(step(60), 60);
  for (std::int64_t items = 101; items < 107; ++items) EXPECT_EQ(step(items), 60);
  EXPECT_EQ(step(107), 107) << "a size of two in nine steps is not usual";
  EXPECT_THROW((void)usual_batch_size({}), InvalidArgument);
}

TEST(Explain, SaysSinceWhenHowMuchSlowerAndWhatItCosts) {
  sim::BoxOptions options = box_of({1.0, 1.0, 1.0, 1.0});
  options.throttles = {{2, 2.0, 50, 1000}};
  sim::Box box(options);
  Balancer balancer = balancer_of(options);
  run(balancer, box, 0, 100);
  const DeviceReport device = balancer.report().devices[2];
  EXPECT_EQ(device.since_step, 50);
  EXPECT_NEAR(device.slowdown, 2.0, 0.05);
  const double gain = 1.0 - ideal({1, 1, 1, 1}) / ideal({1, 1, 0.5, 1});
  EXPECT_NEAR(device.regain, gain, 0.01);
  EXPECT_TRUE(
      says(balancer.explain(), "last at step 50: 2.00 times slower than before it, without which steps would be"));
  EXPECT_EQ(balancer.report().devices[1].slowdown, 0.0);
}

TEST(Explain, DoesNotCallADeviceSlowThatWasFastForAWhileAndIsLevelAgain) {
  sim::BoxOptions options = box_of({1.0, 1.0});
  options.throttles = {{1, 0.8, 50, 100}};
  sim::Box box(options);
  Balancer balancer = balancer_of(options);
  run(balancer, box, 0, 200);
  const DeviceReport device = balancer.report().devices[1];
  EXPECT_EQ(device.change_points + device.drifts, 2);
  EXPECT_EQ(device.equals, 2u);
  EXPECT_EQ(device.slowdown, 1.0);
  EXPECT_EQ(device.regain, 0.0);
  EXPECT_EQ(balancer.explain().find("slower"), std::string::npos) << balancer.explain();
}

TEST(Explain, CallsDevicesSlowThatHaveSlowedDownTogether) {
  sim::BoxOptions options = box_of({1.0, 1.0});
  options.throttles = {{0, 2.0, 50, 1000}, {1, 2.0, 50, 1000}};
  sim::Box box(options);
  Balancer balancer = balancer_of(options);
  run(balancer, box, 0, 100);
  for (const DeviceReport& device : balancer.report().devices) {
    EXPECT_EQ(device.equals, 2u);
    EXPECT_NEAR(device.slowdown, 2.0, 0.05);
  }
}

}  // namespace
}  // namespace paceline::balance
