// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "engine/step/work_queue.hpp"

namespace paceline::internal {
namespace {

struct Played {
  std::vector<std::vector<MicroBatch>> ran;  // per device
  double makespan = 0.0;
};

std::int64_t total(const std::vector<std::int64_t>& shares) {
  std::int64_t sum = 0;
  for (const std::int64_t share : shares) sum += share;
  return sum;
}

// Plays a step on a virtual clock. Device d needs truth[d] for its work, and asks for more when it has run_ahead[d]
// micro-batches left.
Played play(const StepOptions& options, const std::vector<plan::CostModel>& truth) {
  const std::unique_ptr<WorkQueue> queue = WorkQueue::of(options);
  WorkQueue& state = *queue;
  const std::size_t count = options.shares.size();
  Played played{.ran = std::vector<std::vector<MicroBatch>>(count)};
  std::vector<std::vector<double>> finishes(count);
  std::vector<double> asks_at(count, 0.0);
  std::vector<bool> gone(count, false);
  std::int64_t left = total(options.shares);
  for (;;) {
    EXPECT_EQ(state.exhausted(), left == 0);
    std::size_t next = count;
    for (std::size_t d = 0; d < count; ++d) {
      if (!gone[d] && (next == count || asks_at[d] < asks_at[next])) next = d;
    }
    if (next == count) return played;
    const auto claim = state.claim(next, asks_at[next]);
    if (!claim) {
      gone[next] = !state.asks_again(next);
      if (!gone[next]) asks_at[next] = finishes[next].back();
      continue;
    }
    left -= claim->size();
    std::vector<double>& ends = finishes[next];
    const double begins_at = std::max(asks_at[next], ends.empty() ? 0.0 : ends.back());
    ends.push_back(begins_at + truth[next].seconds(claim->size()));
    played.makespan = std::max(played.makespan, ends.back());
    const std::size_t ahead = options.run_ahead.empty() ? 0 : static_cast<std::size_t>(options.run_ahead[next]);
    if (ends.size() > ahead) asks_at[next] = ends[ends.size() - 1 - ahead];
    played.ran[next].push_back(*claim);
  }
}

void expect_every_item_once(const Played& played, const StepOptions& options) {
  const std::int64_t batch = total(options.shares);
  std::vector<int> times(static_cast<std::size_t>(batch), 0);
  for (std::size_t d = 0; d < played.ran.size(); ++d) {
    std::int64_t items = 0;
    for (const MicroBatch& mb : played.ran[d]) {
      ASSERT_LT(mb.begin, mb.end);
      ASSERT_LE(mb.end, batch);
      for (std::int64_t i = mb.begin; i < mb.end; ++i) ++times[static_cast<std::size_t>(i)];
      items += mb.size();
      ASSERT_FALSE(mb.last && &mb != &played.ran[d].back()) << "it is called the last, and is not";
    }
    ASSERT_TRUE(options.stealing || items == options.shares[d]) << "nothing may change hands";
    ASSERT_TRUE(options.shares[d] > 0 || items == 0) << "a planned zero stays one";
  }
  for (const int n : times) ASSERT_EQ(n, 1);
}

struct Case {
  StepOptions options;
  std::vector<plan::CostModel> truth;
};

Case random_case(std::mt19937_64& rng) {
  const auto uniform = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(rng); };
  const std::size_t count = 1 + rng() % 5;
  Case result;
  bool any = false;
  for (std::size_t d = 0; d < count; ++d) {
    const std::int64_t share = rng() % 4 == 0 ? 0 : static_cast<std::int64_t>(rng() % 200);
    any = any || share > 0;
    result.options.shares.push_back(share);
    const plan::CostModel model = plan::CostModel::affine(uniform(0, 2e-3), uniform(1e-5, 2e-4));
    result.truth.push_back(model.scaled(uniform(0.5, 4.0)));
    if (rng() % 5 != 0 || d > 0) {
      result.options.models.push_back(model);
      result.options.noise.push_back(uniform(0, 0.2));
    }
  }
  if (result.options.models.size() != count) {
    result.options.models.clear();
    result.options.noise.clear();
  }
  if (!any) result.options.shares[0] = 7;
  result.options.micro_batch = rng() % 2 == 0 ? 0 : static_cast<std::int64_t>(1 + rng() % 40);
  result.options.granularity = rng() % 3 == 0 ? 8 : 1;
  result.options.stealing = rng() % 4 != 0;
  if (rng() % 2 == 0) {
    for (std::size_t d = 0; d < count; ++d) result.options.run_ahead.push_back(static_cast<std::int64_t>(rng() % 4));
  }
  return result;
}

TEST(WorkQueue, FollowsAScriptWhateverTheSharesAndTheClock) {
  StepOptions options{.shares = {100, 0}, .models = {plan::CostModel::affine(0, 1), plan::CostModel::affine(0, 1e-6)}};
  options.script = {{{.begin = 0, .end = 30}}, {{.begin = 60, .end = 100}, {.begin = 30, .end = 60}}};
  const Played played = play(options, options.models);
  ASSERT_EQ(played.ran[0].size(), 1U);
  ASSERT_EQ(played.ran[1].size(), 2U);
  EXPECT_EQ(played.ran[1][0].begin, 60);
  EXPECT_EQ(played.ran[1][1].begin, 30);
  EXPECT_TRUE(played.ran[0][0].last);
  EXPECT_FALSE(played.ran[1][0].last);
  EXPECT_TRUE(played.ran[1][1].last);
}

TEST(WorkQueue, HandsOutEveryItemExactlyOnceUnderAnySpeeds) {
  std::mt19937_64 rng(7);
  for (int round = 0; round < 5000; ++round) {
    const Case c = random_case(rng);
    SCOPED_TRACE(round);
    expect_every_item_once(play(c.options, c.truth), c.options);
  }
}

TEST(WorkQueue, HandsOutNoFewerThanTheLeastItemsUnderAnySpeeds) {
  std::mt19937_64 rng(11);
  for (int round = 0; round < 20000; ++round) {
    Case c = random_case(rng);
    c.options.least_items = 1 + static_cast<std::int64_t>(rng() % 4);
    if (rng() % 2 == 0) {
      for (std::int64_t& share : c.options.shares) share %= 12;  // so small that most of it is remainders
    }
    for (std::int64_t& share : c.options.shares) share = share > 0 ? std::max(share, c.options.least_items) : 0;
    if (total(c.options.shares) == 0) c.options.shares[0] = c.options.least_items;
    if (c.options.micro_batch > 0) c.options.micro_batch = std::max(c.options.micro_batch % 8, c.options.least_items);
    SCOPED_TRACE(round);
    const Played played = play(c.options, c.truth);
    expect_every_item_once(played, c.options);
    const std::int64_t most = std::max(c.options.micro_batch, 2 * c.options.least_items - 1);
    for (const auto& device : played.ran) {
      for (const MicroBatch& mb : device) {
        ASSERT_GE(mb.size(), c.options.least_items);
        ASSERT_TRUE(c.options.micro_batch == 0 || mb.size() <= most) << mb.size();
      }
    }
  }
}

TEST(WorkQueue, MovesWorkFromADeviceThatTurnsSlowToTheOthers) {
  // Planned evenly with known noise. Then device 1 runs at half its speed, and the corrections must win back part of
  // the loss.
  const plan::CostModel model = plan::CostModel::affine(5e-4, 1e-4);
  StepOptions options{.shares = {256, 256}, .models = {model, model}, .noise = {0.08, 0.08}};
  const std::vector<plan::CostModel> truth{model, model.scaled(2.0)};
  const double with = play(options, truth).makespan;
  options.stealing = false;
  const double without = play(options, truth).makespan;
  EXPECT_LT(with, 0.93 * without);
}

TEST(WorkQueue, MovesWorkThoughDevicesHoldSomeAhead) {
  // A device that asks while its last piece begins must have kept that piece small. If it asked when its whole chunk
  // begins, it would know nothing yet.
  const plan::CostModel model = plan::CostModel::affine(5e-4, 1e-4);
  StepOptions options{.shares = {256, 256}, .models = {model, model}, .noise = {0.08, 0.08}, .run_ahead = {1, 1}};
  const std::vector<plan::CostModel> truth{model, model.scaled(2.0)};
  const Played with = play(options, truth);
  options.stealing = false;
  EXPECT_LT(with.makespan, 0.96 * play(options, truth).makespan);
  ASSERT_GE(with.ran[0].size(), 3U);
  EXPECT_LT(with.ran[0][1].size(), with.ran[0][0].size() / 4);
  EXPECT_FALSE(with.ran[0][1].correction);
  EXPECT_TRUE(with.ran[0][2].correction);
}

TEST(WorkQueue, TakesOverAWholeMicroBatchOnlyWhenItIsDoneSooner) {
  // Device 0 asks at 1, when its first micro-batch is done and one more is left. It would finish a third one at 3, just
  // as its owner would.
  const plan::CostModel model = plan::CostModel::affine(0.0, 0.1);
  StepOptions options{.shares = {20, 30}, .models = {model, model}, .micro_batch = 10, .run_ahead = {1, 0}};
  EXPECT_EQ(play(options, options.models).ran[0].size(), 2U);
  // An owner at half the speed would finish it at 6.
  options.models[1] = model.scaled(2.0);
  EXPECT_EQ(play(options, options.models).ran[0].size(), 3U);
}

TEST(WorkQueue, StealsFixedMicroBatchesUntilBothFinishWithinOneOfThem) {
  const plan::CostModel model = plan::CostModel::affine(0.0, 1e-4);
  const StepOptions options{.shares = {256, 256}, .models = {model, model}, .micro_batch = 16};
  const std::vector<plan::CostModel> truth{model, model.scaled(3.0)};
  const double ideal = 512 * 1e-4 / (1.0 + 1.0 / 3.0);
  EXPECT_LE(play(options, truth).makespan, ideal + truth[1].seconds(16));
}

TEST(WorkQueue, WithMoreLeastItemsThanThereAreEveryShareIsOneMicroBatch) {
  for (const std::int64_t most : {INT64_MAX, INT64_MAX - 1}) {
    StepOptions options{.shares = {50, 30}, .granularity = 4, .least_items = most};
    options.models = {plan::CostModel::affine(0.0, 1.0), plan::CostModel::affine(0.0, 1.0)};
    options.noise = {0.5, 0.5};
    const Played played = play(options, options.models);
    for (const auto& ran : played.ran) EXPECT_EQ(ran.size(), 1u);
  }
}

}  // namespace
}  // namespace paceline::internal
