// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/layout.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.hpp>

#include "errors.hpp"

namespace paceline::plan {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

StageProblem problem(std::size_t blocks, std::vector<double> speeds, double bytes_per_second = 1e10) {
  StageProblem out;
  out.blocks.assign(blocks, {.forward_fixed = 0.0001,
                             .forward_per_item = 0.0004,
                             .backward_fixed = 0.0002,
                             .backward_per_item = 0.0008,
                             .parameter_bytes = 64 * kMiB,
                             .saved_bytes_per_item = kMiB,
                             .boundary_bytes_per_item = kMiB / 16,
                             .workspace_bytes_per_item = 0});
  for (std::size_t i = 0; i < speeds.size(); ++i) {
    out.devices.push_back({.name = "gpu:" + std::to_string(i), .speed = speeds[i], .memory_space = i});
  }
  out.batch_size = 32;
  out.link.bytes_per_second = bytes_per_second;
  return out;
}

LayoutOptions in_micro_batches(std::int64_t count) {
  LayoutOptions out;
  out.stages.micro_batches = count;
  return out;
}

const Layout& find(const std::vector<Layout>& layouts, LayoutKind kind) {
  return *std::ranges::find(layouts, kind, &Layout::kind);
}

TEST(Layout, PrefersDataParallelWhereItFitsAndItsReductionIsCheaperThanTheBubble) {
  const std::vector<Layout> layouts = plan_layouts(problem(6, {1.0, 1.0}), in_micro_batches(8));
  EXPECT_EQ(layouts.size(), 3u);
  EXPECT_EQ(layouts.front().kind, LayoutKind::data_parallel);
  EXPECT_EQ(layouts.front().items, (std::vector<std::int64_t>{16, 16}));
  EXPECT_LT(layouts.front().reduction_seconds, find(layouts, LayoutKind::pipeline).bubble * layouts.front().seconds);
  EXPECT_TRUE(says(layouts.front().reason, "the bubble of a pipeline"));
}

TEST(Layout, PrefersAPipelineWhereTheReductionIsDearer) {
  const std::vector<Layout> layouts = plan_layouts(problem(6, {1.0, 1.0}, 1e9), in_micro_batches(8));
  EXPECT_EQ(layouts.front().kind, LayoutKind::pipeline);
  const Layout& data = find(layouts, LayoutKind::data_parallel);
  // 2 (N - 1) / N of a quarter of the parameter bytes, or one device alone without a reduction.
  const double together = 0.0003 * 6 + 0.0012 * 6 * 16 + 6.0 * 16 * kMiB / 1e9;
  const double alone = 0.0003 * 6 + 0.0012 * 6 * 32;
  EXPECT_NEAR(data.seconds, std::min(together, alone), 1e-9);
  LayoutOptions hidden = in_micro_batches(8);
  hidden.overlap = 0.9;
  EXPECT_EQ(plan_layouts(problem(6, {1.0, 1.0}, 1e9), hidden).front().kind, LayoutKind::data_parallel);
}

TEST(Layout, DevicesOfOneMemorySpaceReduceOverNoLink) {
  StageProblem host = problem(6, {1.0, 1.0}, 1e6);
  for (StageDevice& device : host.devices) device.memory_space = 0;
  const Layout data = plan_layouts(host, in_micro_batches(8)).front();
  EXPECT_EQ(data.kind, LayoutKind::data_parallel);
  EXPECT_EQ(data.reduction_seconds, 0.0);
}

TEST(Layout, AModelThatFitsNoDeviceIsCut) {
  StageProblem large = problem(6, {1.0, 1.0});
  for (StageDevice& device : large.devices) device.memory_bytes = 300 * kMiB;  // the model: 384 MiB
  const std::vector<Layout> layouts = plan_layouts(large, in_micro_batches(8));
  EXPECT_EQ(layouts.front().kind, LayoutKind::pipeline);
  const Layout& data = find(layouts, LayoutKind::data_parallel);
  EXPECT_FALSE(data.fits);
  EXPECT_TRUE(says(data.reason, "384.0 MiB"));
  const Layout& pipeline = layouts.front();
  for (const std::int64_t bytes : pipeline.bytes) EXPECT_LE(bytes, 300 * kMiB);
}

TEST(Layout, BytesOfWeightsGradientsAndStateMayBeGiven) {
  StageProblem frozen = problem(6, {1.0, 1.0}, 1e9);
  for (BlockCost& block : frozen.blocks) {
    block.weight_bytes = 63 * kMiB;
    block.gradient_bytes = kMiB;
  }
  const Layout data = plan_layouts(frozen, in_micro_batches(8)).front();
  EXPECT_EQ(data.kind, LayoutKind::data_parallel);
  EXPECT_NEAR(data.reduction_seconds, 6.0 * kMiB / 1e9, 1e-9);
  frozen.blocks[3].gradient_bytes = 2 * kMiB;
  EXPECT_THROW((void)plan_layouts(frozen), InvalidArgument);
}

TEST(Layout, ADeviceWithLittleMemoryTakesItsShareInSeveralMicroBatches) {
  StageProblem tight = problem(6, {1.0, 1.0});
  tight.devices[1].memory_bytes = (6 * 64 + 6 * 2) * kMiB;  // two items at a time
  const Layout data = find(plan_layouts(tight, in_micro_batches(8)), LayoutKind::data_parallel);
  ASSERT_TRUE(data.fits);
  EXPECT_GT(data.items[0], data.items[1]);
  EXPECT_EQ(data.bytes[1], tight.devices[1].memory_bytes);
  EXPECT_GT(data.items[1], 2);
}

/// The least makespan of pipelines over disjoint sets of devices, by trying all sets and all micro-batch counts.
double best_replicas(const StageProblem& all, std::int64_t count) {
  const std::size_t devices = all.devices.size();
  const std::int64_t size = all.batch_size / count;
  std::map<std::pair<std::size_t, std::int64_t>, double> known;
  const auto seconds = [&](std::size_t mask, std::int64_t n) {
    if (n == 0) return 0.0;
    const auto [found, fresh] = known.try_emplace({mask, n}, 1e9);
    if (!fresh) return found->second;
    StageProblem one = all;
    one.batch_size = n * size;
    one.devices.clear();
    for (std::size_t i = 0; i < devices; ++i) {
      if ((mask >> i & 1) != 0) one.devices.push_back(all.devices[i]);
    }
    try {
      StageOptions options;
      options.micro_batches = n;
      found->second = plan_stages(one, options).seconds;
    } catch (const OutOfMemory&) {
    }
    return found->second;
  };
  double best = 1e9;
  for (std::size_t a = 1; a < std::size_t{1} << devices; ++a) {
    for (std::size_t b = a + 1; b < std::size_t{1} << devices; ++b) {
      if ((a & b) != 0 || (std::has_single_bit(a) && std::has_single_bit(b))) continue;
      for (std::int64_t n = 1; n < count; ++n) best = std::min(best, std::max(seconds(a, n), seconds(b, count - n)));
    }
  }
  return best;
}

TEST(Layout, ReplicasAreAsGoodAsAllPartitionsAndCountsTried) {
  std::mt19937 random(7);
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random()) / 4294967296.0;
  };
  int tried = 0;
  for (int k = 0; k < 25; ++k) {
    StageProblem one = problem(4, {uniform(0.5, 2.0), uniform(0.5, 2.0), uniform(0.5, 2.0)}, 0.0);
    for (BlockCost& block : one.blocks) block.forward_per_item *= uniform(0.5, 2.0);
    for (StageDevice& device : one.devices) device.memory_bytes = std::llround(uniform(180, 420)) * kMiB;
    one.batch_size = 12;
    const std::vector<Layout> layouts = plan_layouts(one, in_micro_batches(6));
    const Layout& replicas = find(layouts, LayoutKind::replicas);
    const double best = best_replicas(one, 6);
    EXPECT_EQ(replicas.fits, best < 1e8);
    if (!replicas.fits) continue;
    ++tried;
    EXPECT_GE(replicas.seconds, best * (1.0 - 1e-9));
    EXPECT_LE(replicas.seconds, best * 1.03);
    std::int64_t items = 0;
    for (const StagePlan& plan : replicas.pipelines) {
      for (const std::int64_t size : plan.sizes) items += size;
    }
    EXPECT_EQ(items, one.batch_size);
  }
  EXPECT_GE(tried, 5);
}

TEST(Layout, ReplicasReduceEachBlockAmongItsOwners) {
  StageProblem one = problem(4, {1.0, 1.0, 1.0, 1.0}, 1e9);
  for (StageDevice& device : one.devices) device.memory_bytes = 200 * kMiB;  // three blocks at most
  const std::vector<Layout> layouts = plan_layouts(one, in_micro_batches(8));
  const Layout& replicas = find(layouts, LayoutKind::replicas);
  ASSERT_TRUE(replicas.fits);
  ASSERT_EQ(replicas.pipelines.size(), 2u);
  std::size_t most = 0;
  for (const StagePlan& plan : replicas.pipelines) {
    ASSERT_EQ(plan.cuts.size(), 2u);
    most = std::max({most, plan.cuts[1], 4 - plan.cuts[1]});
  }
  EXPECT_NEAR(replicas.reduction_seconds, static_cast<double>(most) * 16 * kMiB / 1e9, 1e-9);
}

TEST(Layout, NothingThatFitsIsNoError) {
  StageProblem huge = problem(2, {1.0, 1.0, 1.0});
  for (StageDevice& device : huge.devices) device.memory_bytes = kMiB;
  for (const Layout& one : plan_layouts(huge)) {
    EXPECT_FALSE(one.fits);
    EXPECT_FALSE(one.reason.empty());
  }
  LayoutOptions wrong;
  wrong.overlap = 1.5;
  EXPECT_THROW((void)plan_layouts(problem(2, {1.0}), wrong), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan
