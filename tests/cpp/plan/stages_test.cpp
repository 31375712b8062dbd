// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/stages.hpp>

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include <paceline/error.hpp>

#include "errors.hpp"
#include "stage_brute_force.hpp"

namespace paceline::plan {
namespace {

using Sizes = std::vector<std::size_t>;

StageProblem boxes(std::size_t blocks, const std::vector<double>& speeds, std::int64_t batch_size) {
  StageProblem problem;
  problem.blocks.assign(blocks, {.forward_per_item = 1.0,
                                 .backward_per_item = 2.0,
                                 .parameter_bytes = 100,
                                 .saved_bytes_per_item = 10,
                                 .boundary_bytes_per_item = 1,
                                 .workspace_bytes_per_item = 5});
  for (std::size_t i = 0; i < speeds.size(); ++i)
    problem.devices.push_back({.name = "gpu:" + std::to_string(i), .speed = speeds[i], .memory_space = i});
  problem.batch_size = batch_size;
  return problem;
}

void limit_memory(StageProblem& problem, std::int64_t bytes) {
  for (StageDevice& device : problem.devices) device.memory_bytes = bytes;
}

TEST(Stages, EvaluatesGivenStages) {
  StageProblem problem = boxes(4, {1.0, 2.0}, 5);
  problem.link = {.latency_seconds = 0.5, .bytes_per_second = 4.0};
  const Sizes cuts{0, 1};
  const Sizes order{0, 1};
  const StagePlan plan = evaluate_stages(problem, cuts, order, 2, one_f_one_b(2, 2));
  EXPECT_EQ(plan.sizes, (std::vector<std::int64_t>{3, 2}));
  EXPECT_DOUBLE_EQ(plan.times[0].forward, 3.0);
  EXPECT_DOUBLE_EQ(plan.times[0].send_forward, 0.5 + 3.0 / 4.0);
  EXPECT_DOUBLE_EQ(plan.times[1].forward, 4.5);
  EXPECT_DOUBLE_EQ(plan.times[1].backward, 9.0);
  EXPECT_DOUBLE_EQ(plan.times[1].send_backward, 1.25);
  // Two in flight of one block; one of three blocks and their input.
  EXPECT_EQ(plan.bytes, (std::vector<std::int64_t>{100 + 2 * 30 + 15, 300 + 90 + 3 + 15}));
  EXPECT_DOUBLE_EQ(plan.ideal_seconds, 5 * 4 * 3.0 / 3.0);
  // F0 3, there 1.25, both on stage 1 13.5 and 9, back 1.0, B1 4.
  EXPECT_DOUBLE_EQ(plan.seconds, 3 + 1.25 + 13.5 + 9 + 1.0 + 4);
  EXPECT_DOUBLE_EQ(plan.bound_seconds, 3 + 1.25 + 22.5 + 1.0 + 4);
}

TEST(Stages, OneDeviceRunsMicroBatchesOneByOne) {
  StageProblem problem = boxes(3, {1.0}, 8);
  limit_memory(problem, 300 + 2 * 30 + 2 * 5);
  for (BlockCost& block : problem.blocks) block.forward_fixed = 0.1;
  const StagePlan plan = plan_stages(problem);
  EXPECT_EQ(plan.sizes, (std::vector<std::int64_t>{2, 2, 2, 2}));
  EXPECT_EQ(to_text(plan.schedule), "F0 B0 F1 B1 F2 B2 F3 B3");
}

// A tapered partition with more in flight: 2.29 of the work of one device where a balanced one takes 2.5.
TEST(Stages, TapersEqualDevicesAndKeepsMoreInFlight) {
  const StageProblem problem = boxes(70, {1.0, 1.0}, 4);
  const StagePlan plan = plan_stages(problem);
  const Sizes half{0, 35};
  const Sizes order{0, 1};
  const double balanced = evaluate_stages(problem, half, order, 4, one_f_one_b(2, 4)).seconds;
  EXPECT_NEAR(plan.seconds / balanced, 2.29 / 2.5, 0.003);
  EXPECT_EQ(in_flight(plan.schedule, 0), 4);
}

TEST(Stages, KeepsFewerInFlightWhereMemoryEnds) {
  StageProblem problem = boxes(6, {1.0, 1.0, 1.0}, 8);
  problem.link = {.latency_seconds = 0.4};
  const StagePlan free = plan_stages(problem, {.micro_batches = 8});
  EXPECT_GT(in_flight(free.schedule, 0), 3);
  EXPECT_EQ(in_flight(plan_stages(problem, {.micro_batches = 8, .most_in_flight = 2}).schedule, 0), 2);
  limit_memory(problem, 200 + 2 * 21 + 5);
  const StagePlan tight = plan_stages(problem, {.micro_batches = 8});
  EXPECT_EQ(in_flight(tight.schedule, 0), 2);
  EXPECT_GT(tight.seconds, free.seconds);
}

TEST(Stages, NeighboursTakeTurnsWhereManyStagesHaveLittleMemory) {
  // Each of 24 stages has room for 12 in flight: with twelve depths, two stages each, a micro-batch takes two turns.
  // Not so where 12 are in flight on the first half of them, which then work one after the other.
  constexpr std::size_t kStages = 24;
  StageProblem problem = boxes(kStages, std::vector(kStages, 1.0), 96);
  Sizes each(kStages);
  std::iota(each.begin(), each.end(), std::size_t{0});
  limit_memory(problem, 100 + 12 * 11 + 5);
  const StagePlan given = plan_stages(problem, {.micro_batches = 96, .cuts = each, .order = each});
  EXPECT_EQ(in_flight(given.schedule, 0), 12);
  EXPECT_EQ(in_flight(given.schedule, kStages - 3), 2);
  EXPECT_LT(given.seconds, 3.0 * (2 * 96 + kStages));
  EXPECT_LE(plan_stages(problem).seconds, given.seconds);
}

TEST(Stages, SharedParametersCountOnceInOneMemorySpace) {
  StageProblem problem = boxes(2, {1.0, 1.0}, 4);
  problem.tied_bytes = 80;
  problem.devices[0].memory_space = problem.devices[1].memory_space = 7;
  const Sizes cuts{0, 1};
  const Sizes order{1, 0};
  EXPECT_EQ(evaluate_stages(problem, cuts, order, 4, one_f_one_b(2, 4)).bytes,
            (std::vector<std::int64_t>{100 + 2 * 10 + 5, 20 + 11 + 5}));
  problem.devices[0].memory_space = 1;
  EXPECT_EQ(evaluate_stages(problem, cuts, order, 4, one_f_one_b(2, 4)).bytes[1], 100 + 11 + 5);
}

TEST(Stages, GivenCutsOrderMicroBatchesAndKindAreKept) {
  const StageProblem problem = boxes(8, {1.0, 3.0, 2.0}, 16);
  const StagePlan cut = plan_stages(problem, {.cuts = {0, 6}});
  EXPECT_EQ(cut.cuts, (Sizes{0, 6}));
  EXPECT_EQ(std::ranges::count(cut.order, 1U), 1);
  const StagePlan order = plan_stages(problem, {.order = {2, 1, 0}});
  EXPECT_EQ(order.order, (Sizes{2, 1, 0}));
  EXPECT_EQ(plan_stages(problem, {.micro_batches = 5}).sizes, (std::vector<std::int64_t>{4, 3, 3, 3, 3}));
  const StagePlan gpipe_plan = plan_stages(problem, {.schedule = StageOptions::Kind::gpipe});
  EXPECT_EQ(gpipe_plan.schedule, gpipe(gpipe_plan.cuts.size(), gpipe_plan.schedule.micro_batches));
  EXPECT_GE(gpipe_plan.seconds, plan_stages(problem).seconds);
}

// Too many plans to try all of them: the same through the program over sets of devices.
TEST(Stages, GivenCutsOrderMicroBatchesAndKindAreKeptInLargeCasesToo) {
  const StageProblem problem = boxes(60, {1.0, 1.3, 2.0, 1.1, 1.7, 1.9}, 40);
  const Sizes cuts{0, 10, 20, 30, 45};
  EXPECT_EQ(plan_stages(problem, {.cuts = cuts}).cuts, cuts);
  const Sizes given{5, 3, 1, 0, 2};
  EXPECT_EQ(plan_stages(problem, {.order = given}).order, given);
  EXPECT_EQ(plan_stages(problem, {.micro_batches = 7}).sizes.size(), 7U);
  const StagePlan plan = plan_stages(problem, {.schedule = StageOptions::Kind::gpipe});
  EXPECT_EQ(plan.schedule, gpipe(plan.cuts.size(), plan.schedule.micro_batches));
  EXPECT_EQ(in_flight(plan_stages(problem, {.most_in_flight = 3}).schedule, 0), 3);
}

TEST(Stages, NoiseMakesStagesKeepMoreInFlight) {
  StageProblem problem = boxes(8, {1.0, 1.0}, 16);
  const StageOptions options{.micro_batches = 16, .cuts = {0, 4}};
  const StagePlan calm = plan_stages(problem, options);
  EXPECT_EQ(in_flight(calm.schedule, 0), 2);
  for (StageDevice& device : problem.devices) device.noise = 0.3;
  const StagePlan noisy = plan_stages(problem, options);
  EXPECT_GT(in_flight(noisy.schedule, 0), 2);
  const std::vector<double> noise(2, 0.3);
  EXPECT_DOUBLE_EQ(noisy.seconds, expected_seconds(noisy.schedule, noisy.times, noise));
  EXPECT_LT(noisy.seconds, expected_seconds(calm.schedule, calm.times, noise));
}

TEST(Stages, MovesOnlyWhatPays) {
  StageProblem problem = boxes(12, {1.0, 1.0}, 32);
  StageOptions options{.micro_batches = 32, .previous_cuts = {0, 6}, .previous_order = {1, 0}};
  const StagePlan best = plan_stages(problem, {.micro_batches = 32});
  const StagePlan kept = plan_stages(problem, options);
  EXPECT_DOUBLE_EQ(kept.seconds, best.seconds);
  EXPECT_EQ(kept.order, (Sizes{1, 0}));  // the other order is as quick, but moves everything
  EXPECT_EQ(kept.moved_bytes, 0);
  options.previous_cuts = {0, 7};
  EXPECT_EQ(plan_stages(problem, options).moved_bytes, 100);
  options.indifference = 1.0;
  EXPECT_EQ(plan_stages(problem, options).cuts, (Sizes{0, 7}));
  options.previous_order = {5, 0};  // a device that is gone
  options.previous_cuts = {0, 6};
  options.indifference = 0.0;
  EXPECT_EQ(plan_stages(problem, options).moved_bytes, 600);
  for (StageDevice& device : problem.devices) device.memory_space = 0;
  options.previous_order = {0, 1};
  options.previous_cuts = {0, 2};
  EXPECT_EQ(plan_stages(problem, options).moved_bytes, 0);  // moves within a memory space are free
}

TEST(Stages, SaysWhichDeviceLacksHowManyBytesAndWhatHelps) {
  StageProblem problem = boxes(6, {1.0, 1.0}, 8);
  limit_memory(problem, 310);
  problem.devices[1].memory_bytes = 305;
  const std::string nothing = message_of([&] { (void)plan_stages(problem); });
  EXPECT_TRUE(says(nothing, "needs 335 bytes on gpu:1, which has 305, for blocks 0 to 2 with 1 micro-batch of 1 item"));
  EXPECT_TRUE(says(nothing, "checkpoint activations"));
  limit_memory(problem, 400);
  const std::string size = message_of([&] { (void)plan_stages(problem, {.micro_batches = 1}); });
  EXPECT_TRUE(says(size, "make micro-batches smaller: 8 of 1 item fit"));
  const std::string kind =
      message_of([&] { (void)plan_stages(problem, {.micro_batches = 8, .schedule = StageOptions::Kind::gpipe}); });
  EXPECT_TRUE(says(kind, "use 1F1B"));
  const std::string cuts = message_of([&] { (void)plan_stages(problem, {.cuts = {0, 1}}); });
  EXPECT_TRUE(says(cuts, "leave cuts and order to the planner"));
  const auto error = thrown_by<OutOfMemory>([&] {
    limit_memory(problem, 0);
    (void)plan_stages(problem);
  });
  EXPECT_EQ(error.device().substr(0, 4), "gpu:");
  const Sizes order{0, 1};
  const Sizes half{0, 3};
  EXPECT_NE(message_of([&] {
              (void)evaluate_stages(problem, half, order, 8, one_f_one_b(2, 8));
            }).find("stage 0 needs 365 bytes on gpu:0, which has 0"),
            std::string::npos);
}

TEST(Stages, FindsTheOnlyPlanThatFitsAmongMany) {
  // Each of 8 unlike devices has room for exactly its own number of blocks.
  StageProblem problem = boxes(36, {1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7}, 100'000);
  for (std::size_t i = 0; i < 8; ++i) problem.devices[i].memory_bytes = static_cast<std::int64_t>(i + 1) * 110 + 1 + 5;
  const StagePlan plan = plan_stages(problem, {.micro_batches = 100'000});
  ASSERT_EQ(plan.order.size(), 8U);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ((i + 1 < 8 ? plan.cuts[i + 1] : 36) - plan.cuts[i], plan.order[i] + 1);
  problem.devices[3].memory_bytes -= 10;
  EXPECT_THROW((void)plan_stages(problem, {.micro_batches = 1000}), OutOfMemory);
}

TEST(Stages, RefusesNumbersThatMakeNoSense) {
  const StageProblem good = boxes(4, {1.0, 1.0}, 8);
  const auto with = [&](const auto& change) {
    StageProblem problem = good;
    change(problem);
    return message_of([&] { (void)plan_stages(problem); });
  };
  using P = StageProblem;
  EXPECT_TRUE(says(with([](P& p) { p.blocks.clear(); }), "at least one block"));
  EXPECT_TRUE(says(with([](P& p) { p.devices.clear(); }), "at least one device"));
  EXPECT_TRUE(says(with([](P& p) { p.batch_size = 0; }), "batch_size is 0"));
  EXPECT_TRUE(says(with([](P& p) { p.blocks[2].forward_fixed = -1; }), "block 2: forward_fixed is -1"));
  EXPECT_TRUE(says(with([](P& p) { p.blocks[1].saved_bytes_per_item = -2; }), "block 1: saved_bytes_per_item is -2"));
  EXPECT_TRUE(says(with([](P& p) { p.devices[1].speed = 0; }), "device 1: speed is 0"));
  EXPECT_TRUE(says(with([](P& p) { p.devices[0].noise = std::numeric_limits<double>::infinity(); }), "noise is inf"));
  EXPECT_TRUE(says(with([](P& p) { p.link.bytes_per_second = -1; }), "the link"));
  EXPECT_TRUE(says(with([](P& p) { p.tied_bytes = 101; }), "tied_bytes is 101"));
  EXPECT_TRUE(says(with([](P& p) { p.blocks[0].parameter_bytes = INT64_MAX; }), "63 bits"));

  const auto told = [&](const StageOptions& options) { return message_of([&] { (void)plan_stages(good, options); }); };
  EXPECT_TRUE(says(told({.micro_batches = 9}), "micro_batches is 9"));
  EXPECT_TRUE(says(told({.cuts = {1, 2}}), "cuts[0] is 1"));
  EXPECT_TRUE(says(told({.cuts = {0, 4}}), "cuts[1] is 4"));
  EXPECT_TRUE(says(told({.cuts = {0, 1, 2}}), "3 stages are too many for 2 devices"));
  EXPECT_TRUE(says(told({.order = {0, 2}}), "order[1] is 2"));
  EXPECT_TRUE(says(told({.order = {1, 1}}), "order[0] is 1 again"));
  EXPECT_TRUE(says(told({.cuts = {0, 1}, .order = {0}}), "2 cuts, but 1 devices"));
  EXPECT_TRUE(says(told({.most_in_flight = -1}), "most_in_flight is -1"));
  EXPECT_TRUE(says(told({.indifference = -0.1}), "indifference is -0.1"));
  EXPECT_TRUE(says(told({.previous_cuts = {0}}), "1 previous_cuts"));

  const Sizes cuts{0, 2};
  const Sizes order{0, 1};
  EXPECT_THROW((void)evaluate_stages(good, cuts, order, 2, one_f_one_b(2, 3)), InvalidArgument);
  EXPECT_THROW((void)evaluate_stages(good, cuts, order, 9, one_f_one_b(2, 9)), InvalidArgument);
  EXPECT_THROW((void)evaluate_stages(good, cuts, order, 2, one_f_one_b(1, 2)), InvalidArgument);
  EXPECT_THROW((void)evaluate_stages(good, {}, {}, 2, one_f_one_b(1, 2)), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan
