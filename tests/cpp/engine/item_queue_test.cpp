// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>

#include "engine/loop/item_work.hpp"
#include "engine/step/work_queue.hpp"
#include "host_group.hpp"

namespace paceline::internal {
namespace {

/// A plan for items of random lengths, with devices that take `speeds` seconds for a unit of work.
std::shared_ptr<BatchPlan> plan_of(std::mt19937_64& rng, std::size_t items, const std::vector<double>& targets,
                                   const std::vector<double>& speeds, std::int64_t least = 1) {
  std::lognormal_distribution<double> draw(3.0, 0.7);
  auto plan = std::make_shared<BatchPlan>();
  for (std::size_t k = 0; k < items; ++k) plan->costs.push_back(draw(rng));
  plan->shapes.assign(targets.size(), {.cost = {10.0, 1.0, 0.0}});
  plan->arrangement = plan::arrange_items(plan->costs, targets, plan->shapes, {.min_items = least});
  for (const std::int64_t item : plan->arrangement.order) {
    plan->ordered_costs.push_back(plan->costs[static_cast<std::size_t>(item)]);
  }
  const auto& [order, bounds, first, work] = plan->arrangement;
  for (std::size_t d = 0; d < targets.size(); ++d) plan->shares.push_back(bounds[first[d + 1]] - bounds[first[d]]);
  plan->seconds_per_work = speeds;
  return plan;
}

struct Played {
  std::vector<int> ran;        // how often each item ran
  std::vector<double> finish;  // per device
  std::vector<MicroBatch> claimed;
};

/// Virtual time: whoever is free first claims next; what a unit of work really takes is `truth`.
Played play(const std::shared_ptr<const BatchPlan>& plan, const std::vector<double>& truth, bool stealing,
            bool any_size, std::int64_t least = 1) {
  const std::unique_ptr<internal::WorkQueue> queue = internal::item_queue(plan, stealing, any_size, least);
  Played played{std::vector<int>(plan->costs.size(), 0), std::vector<double>(truth.size(), 0.0), {}};
  std::vector<double> now(truth.size(), 0.0);
  std::vector<bool> left(truth.size(), false);
  while (std::find(left.begin(), left.end(), false) != left.end()) {
    std::size_t d = truth.size();
    for (std::size_t k = 0; k < truth.size(); ++k) {
      if (!left[k] && (d == truth.size() || now[k] < now[d])) d = k;
    }
    const auto mb = queue->claim(d, now[d]);
    if (!mb) {
      left[d] = true;
      continue;
    }
    for (const std::int64_t item : mb->items) ++played.ran[static_cast<std::size_t>(item)];
    EXPECT_EQ(static_cast<std::int64_t>(mb->items.size()), mb->size());
    now[d] += plan->work(d, mb->begin, mb->end) * truth[d];
    played.finish[d] = now[d];
    played.claimed.push_back(*mb);
    played.claimed.back().device = DeviceId(d);
  }
  return played;
}

TEST(ItemQueue, AScriptHandsOutItemsToo) {
  std::mt19937_64 rng(5);
  const std::shared_ptr<BatchPlan> plan = plan_of(rng, 20, {1.0, 1.0}, {1.0, 1.0});
  const std::unique_ptr<internal::WorkQueue> queue = internal::WorkQueue::of(
      {.shares = plan->shares,
       .script = {{{.begin = 12, .end = 20}, {.begin = 0, .end = 5}}, {{.begin = 5, .end = 12}}},
       .plan = plan});
  std::vector<std::int64_t> ran;
  for (const std::size_t d : {0, 0, 1}) {
    const auto claim = queue->claim(d, 0.0);
    ASSERT_TRUE(claim);
    ASSERT_EQ(std::ssize(claim->items), claim->size());
    EXPECT_EQ(claim->items.front(), plan->arrangement.order[static_cast<std::size_t>(claim->begin)]);
    ran.insert(ran.end(), claim->items.begin(), claim->items.end());
  }
  std::ranges::sort(ran);
  for (std::size_t k = 0; k < 20; ++k) EXPECT_EQ(ran[k], static_cast<std::int64_t>(k));
}

TEST(ItemQueue, HandsOutEveryItemOnceInMicroBatchesThatAreLargeEnough) {
  std::mt19937_64 rng(3);
  for (int round = 0; round < 700; ++round) {
    const std::size_t devices = 1 + rng() % 4;
    std::vector<double> targets;
    std::vector<double> truth;
    for (std::size_t d = 0; d < devices; ++d) {
      targets.push_back(1.0 + static_cast<double>(rng() % 3));
      truth.push_back(1e-6 * (1.0 + static_cast<double>(rng() % 20)));
    }
    const std::vector<double> speeds = round % 3 == 0 ? std::vector<double>{} : std::vector<double>(devices, 1e-6);
    const auto least = static_cast<std::int64_t>(1 + rng() % 3);
    const auto items = static_cast<std::int64_t>(1 + rng() % 60);
    const auto plan = plan_of(rng, static_cast<std::size_t>(items), targets, speeds, least);
    const bool stealing = round % 5 != 0;
    const Played played = play(plan, truth, stealing, round % 2 == 0, least);
    EXPECT_TRUE(std::all_of(played.ran.begin(), played.ran.end(), [](int n) { return n == 1; })) << round;
    std::vector<std::int64_t> ran(devices, 0);
    for (const MicroBatch& mb : played.claimed) {
      EXPECT_GE(mb.size(), std::min(least, items)) << round;
      EXPECT_TRUE(stealing || !mb.correction) << round;
      ran[mb.device.number()] += mb.size();
    }
    EXPECT_TRUE(stealing || ran == plan->shares) << round;
  }
}

TEST(ItemQueue, AFastDeviceTakesOverFromOneThatBecameSlow) {
  std::mt19937_64 rng(5);
  const auto plan = plan_of(rng, 128, {1.0, 1.0}, {1e-6, 1e-6});
  const std::vector<double> truth{1e-6, 3e-6};
  const auto makespan = [&](bool stealing, bool any_size) {
    const Played played = play(plan, truth, stealing, any_size);
    return *std::max_element(played.finish.begin(), played.finish.end());
  };
  const double stays = makespan(false, true);
  const double whole = makespan(true, false);
  const double parts = makespan(true, true);
  EXPECT_LT(whole, 0.8 * stays);
  EXPECT_LE(parts, whole);
  EXPECT_LT(parts, 0.6 * stays);  // 0.5 would be even
}

constexpr DeviceId kTwo[] = {0, 5};

internal::ItemTiming timing_of(std::mt19937_64& rng, DeviceId device) {
  std::uniform_int_distribution<int> count(1, 40);
  std::lognormal_distribution<double> length(3.0, 0.6);
  internal::ItemTiming timing{.device = device, .count = static_cast<double>(count(rng))};
  for (int k = 0; k < static_cast<int>(timing.count); ++k) {
    const double one = length(rng);
    timing.longest = std::max(timing.longest, one);
    timing.sum += one;
    timing.squares += one * one;
  }
  return timing;
}

TEST(ItemShapes, TellsWhatTimesFollow) {
  for (const auto measure : {plan::ItemMeasure::padded, plan::ItemMeasure::sum, plan::ItemMeasure::count}) {
    std::mt19937_64 rng(11);
    std::normal_distribution<double> noise(1.0, 0.02);
    internal::ItemShapes shapes;
    const plan::ItemShape truth{.cost = {1e-3, 2e-5, measure == plan::ItemMeasure::count ? 0.0 : 1e-7},
                                .measure = measure};
    for (int k = 0; k < 200; ++k) {
      internal::ItemTiming timing = timing_of(rng, kTwo[k % 2]);
      timing.seconds = internal::work_of(truth, timing) * noise(rng) * (k % 2 == 0 ? 1.0 : 2.5);
      shapes.add(timing);
    }
    ASSERT_TRUE(shapes.fit({kTwo, {0, 0}}));
    EXPECT_EQ(shapes.shape().measure, measure);
    EXPECT_NEAR(shapes.shape().cost.per_token_seconds, 2e-5, 0.2 * 2e-5);
    EXPECT_LT(shapes.error(), 0.03);
  }
}

TEST(ItemShapes, ADeviceThatChangedItsSpeedIsNoOtherShape) {
  std::mt19937_64 rng(12);
  internal::ItemShapes shapes;
  const plan::ItemShape truth{.cost = {1e-3, 2e-5, 0.0}};
  for (int k = 0; k < 100; ++k) {
    internal::ItemTiming timing = timing_of(rng, 0);
    timing.step = k;
    timing.seconds = internal::work_of(truth, timing) * (k < 50 ? 1.0 : 3.0);
    shapes.add(timing);
  }
  ASSERT_TRUE(shapes.fit({{kTwo, 1}, {50}}));
  EXPECT_LT(shapes.error(), 1e-6);
  internal::ItemShapes unaware = shapes;
  ASSERT_TRUE(unaware.fit({{kTwo, 1}, {0}}));
  EXPECT_GT(unaware.error(), 0.1);
}

TEST(ItemShapes, SaysNothingOfItemsWhereTimesDoNot) {
  std::mt19937_64 rng(13);
  internal::ItemShapes shapes;
  for (int k = 0; k < 50; ++k) {
    internal::ItemTiming timing = timing_of(rng, 0);
    timing.seconds = 1e-3;
    shapes.add(timing);
  }
  EXPECT_FALSE(shapes.fit({{kTwo, 1}, {0}}));
  EXPECT_FALSE(shapes.fitted());
}

TEST(StepsWithCosts, TheGradientIsThatOfEveryItemOnce) {
  const DeviceGroup group = host_group(2);
  BasicDataParallel<double> trainer{group, {.parameter_count = 50}};
  std::mt19937_64 rng(2);
  for (int step = 0; step < 30; ++step) {
    std::vector<double> costs(50);
    for (double& cost : costs) cost = static_cast<double>(rng() % 9);
    const Objective loss = trainer.step(costs, [&](const MicroBatch& mb, BasicReplica<double>& replica) {
      EXPECT_EQ(static_cast<std::int64_t>(mb.items.size()), mb.size());
      for (const std::int64_t item : mb.items) replica.gradients[static_cast<std::size_t>(item)] += 50.0;
      return static_cast<double>(mb.size());
    });
    EXPECT_DOUBLE_EQ(loss.value(), 1.0);
    for (const double gradient : trainer.gradients()) ASSERT_DOUBLE_EQ(gradient, 1.0);
    EXPECT_EQ(std::accumulate(trainer.shares().begin(), trainer.shares().end(), std::int64_t{0}), 50);
  }
  ASSERT_TRUE(trainer.item_report());
  EXPECT_EQ(trainer.item_report()->steps, 30);
  EXPECT_LE(trainer.item_report()->padding.own, trainer.item_report()->padding.padded);
  EXPECT_THROW(trainer.step(std::vector<double>{1.0, -1.0}, [](const MicroBatch&, auto&) { return 0.0; }),
               InvalidArgument);
  EXPECT_DOUBLE_EQ(trainer.step(50, [](const MicroBatch& mb, auto&) { return static_cast<double>(mb.size()); }).value(),
                   1.0);
}

/// The loop that a step with costs goes through.
struct Loop {
  balance::Balancer balancer;
  ItemWork work;

  std::shared_ptr<const BatchPlan> next(const std::vector<double>& costs) {
    check_costs(costs);
    return work.arrange(costs, balancer.next_plan(work.begin(costs)), 1);
  }
  void record(const BatchPlan& plan, const StepRecord& record) {
    balancer.record(plan.timings(record));
    work.record(plan, record, balancer);
  }
};

Loop loop_of(const std::vector<std::string>& classes) {
  balance::BalancerOptions options;
  options.proportional = true;
  PerDevice<std::string> by_id;  // of a group that others have left
  for (std::size_t i = 0; i < classes.size(); ++i) {
    options.devices.push_back({classes[i] + ":" + std::to_string(i), classes[i], {}});
    by_id.add(DeviceId(3 * i + 2), classes[i]);
  }
  return {balance::Balancer(options), ItemWork(by_id, 0, false)};
}

/// What the balancer is asked for, for a batch that costs `cost` in all.
std::int64_t size_of(Loop& loop, double cost) {
  return loop.next(std::vector<double>(8, cost / 8.0))->balance.batch_size;
}

TEST(ItemWork, TellsTheBalancerOneTimeForOneShareAndThatNothingOfItIsFixed) {
  Loop loop = loop_of({"host", "host"});
  for (int step = 0; step < 20; ++step) {
    const auto plan = loop.next(std::vector<double>{4, 3, 2, 2, 1, 1});
    StepRecord record;
    for (std::size_t d = 0; d < 2; ++d) {
      const std::int64_t begin = d == 0 ? 0 : plan->shares[0];
      record.claims.push_back({{.begin = begin, .end = begin + plan->shares[d], .device = plan->devices[d]}, 0.0, 1.0});
    }
    record.compute_seconds = 1.0;
    for (const auto& device : plan->timings(record).devices) EXPECT_EQ(device.size(), 1U);
    loop.record(*plan, record);
  }
  for (const balance::DeviceReport& device : loop.balancer.report().devices) {
    EXPECT_EQ(device.fixed_seconds, 0.0);
    EXPECT_EQ(device.fixed_error, 0.0);
  }
}

TEST(ItemWork, HasTwoBatchSizesForEachDoublingOfCostsAtMost) {
  std::mt19937_64 rng(2);
  std::uniform_real_distribution<double> exponent(0.0, 6.0);
  Loop loop = loop_of({"host", "host"});
  const double unit = static_cast<double>(size_of(loop, 8.0)) / 8.0;
  std::set<std::int64_t> sizes;
  for (int step = 0; step < 500; ++step) {
    const double cost = std::exp2(exponent(rng));
    const std::int64_t size = size_of(loop, cost);
    EXPECT_LE(std::abs(std::log2(static_cast<double>(size) / (unit * cost))), 0.5 + 1e-6);
    sizes.insert(size);
  }
  EXPECT_LE(sizes.size(), 13U);
  EXPECT_GE(sizes.size(), 6U) << "they still differ";
}

TEST(ItemWork, StaysWithTheLastBatchSizeNearABorder) {
  Loop loop = loop_of({"host", "host"});
  const std::int64_t low = size_of(loop, 100.0);
  EXPECT_EQ(size_of(loop, 140.0), low);
  const std::int64_t high = size_of(loop, 190.0);
  EXPECT_GT(high, low);
  EXPECT_EQ(size_of(loop, 138.0), high) << "the other one is as near, but no batch shall change its size by noise";
  EXPECT_EQ(size_of(loop, 100.0), low);
  EXPECT_EQ(size_of(loop, 140.0), low);
}

TEST(ItemWork, TellsTheSizeOfABatchBeforeItIsPlanned) {
  Loop loop = loop_of({"host", "host"});
  for (const double cost : {3.0, 4.0, 100.0, 5.0, 1e-15, 0.0, 1e30, 3.0}) {
    const std::vector<double> costs(8, cost / 8.0);
    const std::int64_t told = loop.work.batch_units(costs);
    EXPECT_EQ(loop.next(costs)->balance.batch_size, told) << "for " << cost;
  }
  EXPECT_THROW((void)loop.next(std::vector<double>{-1.0}), InvalidArgument);
}

TEST(ItemWork, TellsEachDeviceClassByItsName) {
  const std::vector<std::string> classes = {"quick", "slow"};
  Loop loop = loop_of(classes);
  std::mt19937_64 rng(3);
  std::uniform_real_distribution<double> length(1.0, 9.0);
  for (int step = 0; step < 12; ++step) {
    std::vector<double> costs(64);
    for (double& cost : costs) cost = length(rng);
    const auto plan = loop.next(costs);
    StepRecord record;
    for (std::size_t device = 0; device < classes.size(); ++device) {
      const auto& [order, bounds, first, work] = plan->arrangement;
      for (std::size_t k = first[device]; k < first[device + 1]; ++k) {
        const double longest = plan->ordered_costs[static_cast<std::size_t>(bounds[k])];
        const auto count = static_cast<double>(bounds[k + 1] - bounds[k]);
        ClaimRecord claim;
        claim.micro_batch = {.begin = bounds[k], .end = bounds[k + 1], .device = plan->devices[device]};
        claim.finish_seconds = 1e-3 * static_cast<double>(device + 1) * longest * count;
        record.claims.push_back(claim);
      }
    }
    loop.record(*plan, record);
  }
  const std::string told = loop.work.explain();
  for (const std::string& name : classes) {
    EXPECT_NE(told.find("  on " + name + ", a micro-batch takes "), std::string::npos) << told;
  }
  EXPECT_TRUE(loop.work.report().device_class == "quick" || loop.work.report().device_class == "slow");
}

TEST(ItemWork, CostsOfAnySizeAreBatchSizesThatCanBeSplit) {
  Loop loop = loop_of({"host", "host"});
  size_of(loop, 1.0);
  EXPECT_EQ(size_of(loop, 1e-12), 1000);
  EXPECT_EQ(size_of(loop, 1e-15), 1000);
  const std::int64_t most = size_of(loop, 1e30);
  EXPECT_EQ(size_of(loop, 1e60), most);
  EXPECT_EQ(size_of(loop, 1.0), 1000000);
}

}  // namespace
}  // namespace paceline::internal
