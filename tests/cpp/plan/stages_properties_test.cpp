// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <paceline/error.hpp>

#include "stage_brute_force.hpp"

namespace paceline::plan {
namespace {

using testing::StageCases;

TEST(StagesProperties, PlansAreAsQuickAsTheBestOfAllOrdersCutsDepthsAndMicroBatches) {
  StageCases cases(1);
  int infeasible = 0;
  int shortened = 0;
  for (int round = 0; round < 5000; ++round) {
    const StageProblem problem = cases.next(3, 4, 4);
    double best = std::numeric_limits<double>::infinity();
    testing::every_plan(problem, 1, problem.batch_size,
                        [&](const auto& cuts, const auto& order, std::int64_t count, const auto& depths) {
                          best = std::min(best, testing::simulate(schedule_of_depths(depths, count),
                                                                  testing::times_of(problem, cuts, order, count)));
                        });
    if (best == std::numeric_limits<double>::infinity()) {
      ++infeasible;
      ASSERT_THROW((void)plan_stages(problem), OutOfMemory) << "round " << round;
      continue;
    }
    const StagePlan plan = plan_stages(problem);
    ASSERT_NEAR(plan.seconds, best, 1e-9 * best) << "round " << round;
    const auto count = static_cast<std::int64_t>(plan.sizes.size());
    ASSERT_NEAR(testing::simulate(plan.schedule, testing::times_of(problem, plan.cuts, plan.order, count)), best,
                1e-9 * best);
    ASSERT_LE(plan.bound_seconds, plan.seconds * (1 + 1e-12));
    ASSERT_LE(plan.ideal_seconds, plan.seconds * (1 + 1e-12));
    for (std::size_t i = 0; i < plan.cuts.size(); ++i) {
      const std::int64_t bytes =
          testing::bytes_of(problem, plan.cuts, plan.order, count, i, in_flight(plan.schedule, i));
      ASSERT_EQ(plan.bytes[i], bytes);
      ASSERT_LE(bytes, problem.devices[plan.order[i]].memory_bytes);
    }
    if (plan.cuts.size() < problem.devices.size()) ++shortened;
  }
  EXPECT_GT(infeasible, 100);
  EXPECT_GT(shortened, 100);
}

TEST(StagesProperties, PlansMoveTheFewestBytesOfAllThatAreAboutAsQuickAsTheBest) {
  StageCases cases(2);
  int moved = 0;
  for (int round = 0; round < 500; ++round) {
    const StageProblem problem = cases.next(3, 4, 3);
    StageOptions options{.indifference = cases.chance(0.3) ? 0.0 : cases.real(0.0, 0.5)};
    options.previous_order.push_back(static_cast<std::size_t>(cases.integer(0, 3)));
    options.previous_cuts.push_back(0);
    for (std::size_t cut = 1; cut < problem.blocks.size(); ++cut) {
      if (!cases.chance(0.5)) continue;
      options.previous_cuts.push_back(cut);
      options.previous_order.push_back(static_cast<std::size_t>(cases.integer(0, 3)));
    }
    const auto moves = [&](const auto& cuts, const auto& order) {
      std::int64_t bytes = 0;
      const auto device = [](const auto& firsts, const auto& devices, std::size_t block) {
        return devices[static_cast<std::size_t>(std::ranges::upper_bound(firsts, block) - firsts.begin()) - 1];
      };
      for (std::size_t block = 0; block < problem.blocks.size(); ++block) {
        const std::size_t now = device(cuts, order, block);
        const std::size_t before = device(options.previous_cuts, options.previous_order, block);
        if (before >= problem.devices.size() ||
            problem.devices[now].memory_space != problem.devices[before].memory_space)
          bytes += problem.blocks[block].parameter_bytes;
      }
      return bytes;
    };
    std::vector<std::pair<double, std::int64_t>> plans;
    double best = std::numeric_limits<double>::infinity();
    testing::every_plan(problem, 1, problem.batch_size,
                        [&](const auto& cuts, const auto& order, std::int64_t count, const auto& depths) {
                          plans.emplace_back(testing::simulate(schedule_of_depths(depths, count),
                                                               testing::times_of(problem, cuts, order, count)),
                                             moves(cuts, order));
                          best = std::min(best, plans.back().first);
                        });
    if (plans.empty()) continue;
    std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    for (const auto& [seconds, bytes] : plans)
      if (seconds <= best * (1.0 + std::max(options.indifference, 1e-9))) fewest = std::min(fewest, bytes);
    double quickest = std::numeric_limits<double>::infinity();
    for (const auto& [seconds, bytes] : plans)
      if (bytes == fewest) quickest = std::min(quickest, seconds);
    const StagePlan plan = plan_stages(problem, options);
    ASSERT_EQ(plan.moved_bytes, fewest) << "round " << round;
    ASSERT_EQ(moves(plan.cuts, plan.order), fewest);
    ASSERT_NEAR(plan.seconds, quickest, 1e-9 * quickest) << "round " << round;
    if (fewest > 0) ++moved;
  }
  EXPECT_GT(moved, 50);
}

/// Whether any order, cuts and depths take less than `limit` seconds. Branches whose first stages alone take longer are
/// left out: a stage works for all micro-batches, after the first has come and before the last has gone back.
class Exhaustive {
 public:
  Exhaustive(const StageProblem& problem, std::int64_t micro_batches, double limit)
      : problem_(problem), count_(micro_batches), limit_(limit) {}

  bool any(std::size_t from = 0, double around = 0.0) {
    if (from == problem_.blocks.size()) return any_depths();
    for (std::size_t device = 0; device < problem_.devices.size(); ++device) {
      if (std::ranges::count(order_, device) > 0) continue;
      const double items = static_cast<double>(problem_.batch_size) / static_cast<double>(count_);
      double come = around;
      if (from > 0 && problem_.devices[order_.back()].memory_space != problem_.devices[device].memory_space)
        come +=
            2 * (problem_.link.latency_seconds + static_cast<double>(problem_.blocks[from].boundary_bytes_per_item) *
                                                     items / problem_.link.bytes_per_second);
      double stage = 0.0;
      bool found = false;
      order_.push_back(device);
      cuts_.push_back(from);
      for (std::size_t to = from + 1; to <= problem_.blocks.size() && !found; ++to) {
        const BlockCost& block = problem_.blocks[to - 1];
        stage +=
            (block.forward_fixed + block.backward_fixed + items * (block.forward_per_item + block.backward_per_item)) /
            problem_.devices[device].speed;
        if (static_cast<double>(count_) * stage + come >= limit_) break;
        found = any(to, come + stage);
      }
      order_.pop_back();
      cuts_.pop_back();
      if (found) return true;
    }
    return false;
  }

  [[nodiscard]] int tried() const { return tried_; }

 private:
  bool any_depths() {
    times_ = testing::times_of(problem_, cuts_, order_, count_);
    depths_.clear();
    return any_depths_from();
  }

  bool any_depths_from() {
    const std::size_t stage = depths_.size();
    if (stage == cuts_.size()) {
      ++tried_;
      return testing::simulate(schedule_of_depths(depths_, count_), times_) < limit_;
    }
    // More than 1 on the last stage is never better, as the proof with small cases shows.
    const std::int64_t most = stage + 1 == cuts_.size() ? 1 : stage == 0 ? count_ : depths_.back();
    for (std::int64_t depth = 1; depth <= most; ++depth) {
      if (testing::bytes_of(problem_, cuts_, order_, count_, stage, depth) >
          problem_.devices[order_[stage]].memory_bytes)
        break;
      depths_.push_back(depth);
      const bool found = any_depths_from();
      depths_.pop_back();
      if (found) return true;
    }
    return false;
  }

  const StageProblem& problem_;
  std::int64_t count_;
  double limit_;
  std::vector<std::size_t> cuts_;
  std::vector<std::size_t> order_;
  std::vector<std::int64_t> depths_;
  testing::BatchTimes times_;
  int tried_ = 0;
};

StageProblem large_case(StageCases& cases, std::size_t devices, std::size_t blocks, std::int64_t items, bool capped) {
  StageProblem problem;
  for (std::size_t i = 0; i < blocks; ++i) {
    const double size = i + 1 == blocks ? 2.0 : cases.real(0.7, 1.3);
    problem.blocks.push_back({.forward_fixed = 0.05,
                              .forward_per_item = size,
                              .backward_fixed = 0.1,
                              .backward_per_item = 2 * size,
                              .parameter_bytes = 100,
                              .saved_bytes_per_item = 20,
                              .boundary_bytes_per_item = 2,
                              .workspace_bytes_per_item = 5});
  }
  const auto fair = static_cast<std::int64_t>(blocks * 150 / devices);
  for (std::size_t i = 0; i < devices; ++i)
    problem.devices.push_back({.speed = cases.real(1.0, 3.0),
                               .memory_bytes = capped ? fair + cases.integer(0, 250) : StageDevice::kUnlimitedBytes,
                               .memory_space = i});
  problem.batch_size = items;
  problem.link = {.latency_seconds = 0.02, .bytes_per_second = 40.0};
  return problem;
}

TEST(StagesSearch, IsWithinOnePerCentOfExhaustiveSearchUpToEightDevices) {
  StageCases cases(11);
  int planned = 0;
  int tried = 0;
  struct Size {
    std::size_t devices, blocks;
    std::int64_t micro_batches;
    int rounds;
  };
  for (const Size size :
       {Size{3, 16, 24, 6}, Size{4, 12, 12, 15}, Size{5, 12, 8, 3}, Size{6, 10, 6, 2}, Size{8, 8, 4, 1}}) {
    for (int round = 0; round < size.rounds; ++round) {
      const StageProblem problem = large_case(cases, size.devices, size.blocks, 2 * size.micro_batches, round % 2 == 1);
      try {
        const StagePlan plan = plan_stages(problem, {.micro_batches = size.micro_batches});
        Exhaustive search(problem, size.micro_batches, plan.seconds / 1.01);
        EXPECT_FALSE(search.any()) << size.devices << " devices, round " << round;
        tried += search.tried();
        ++planned;
      } catch (const OutOfMemory&) {
        Exhaustive search(problem, size.micro_batches, 1e9);
        EXPECT_FALSE(search.any()) << size.devices << " devices, round " << round;
      }
    }
  }
  EXPECT_GT(planned, 15);
  EXPECT_GT(tried, 1000);
}

}  // namespace
}  // namespace paceline::plan
