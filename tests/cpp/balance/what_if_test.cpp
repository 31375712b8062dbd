// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <sstream>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::balance {
namespace {

using Shares = std::vector<std::int64_t>;

sim::BoxOptions box_of(const std::vector<double>& speeds) {
  sim::BoxOptions box;
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    box.devices.push_back({.name = "sim:" + std::to_string(i), .speed = speeds[i]});
  }
  return box;
}

Balancer balancer_of(const sim::BoxOptions& box) {
  BalancerOptions options;
  for (const sim::SimDevice& device : box.devices) options.devices.push_back({device.name, "sim", device.limits});
  return Balancer(options);
}

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
  EXPECT_NE(more.text.find("shorter"), std::string::npos);
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
  EXPECT_THROW((void)balancer.what_if({.remove = {0, 1}}), InvalidArgument);
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
  EXPECT_NE(balancer.explain().find("last at step 50: 2.00 times slower since then, without which steps would be"),
            std::string::npos)
      << balancer.explain();
  EXPECT_EQ(balancer.report().devices[1].slowdown, 0.0);
}

}  // namespace
}  // namespace paceline::balance
