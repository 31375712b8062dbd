// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <paceline/error.hpp>

#include "stage_brute_force.hpp"

namespace paceline::plan {
namespace {

using testing::StageCases;

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
       {Size{3, 16, 24, 10}, Size{4, 12, 12, 16}, Size{5, 12, 8, 4}, Size{6, 10, 6, 4}, Size{8, 8, 4, 2}}) {
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
  EXPECT_GT(planned, 30);
  EXPECT_GT(tried, 1000);
}

}  // namespace
}  // namespace paceline::plan
