// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

TEST(PoolKinds, AreForgottenOnceNothingOfThemIsThere) {
  Box box({1.0, 2.0}, {.placement = Placement::any},
          {.name = "old", .model = "m", .resident_bytes = 3.0, .reload_seconds = 1.0});
  (void)box.submit(0.0);
  const PoolStart run = box.last.starts.at(0);
  const JobId held = box.submit(0.0, {.not_before_seconds = 5.0});
  EXPECT_FALSE(box.pool.forget(0)) << "a job runs, and one waits";
  (void)box.finish(1.0, run);
  EXPECT_FALSE(box.pool.forget(0)) << "a job waits";
  bool cancelled = false;
  (void)box.pool.cancel(1.0, held, cancelled);
  EXPECT_TRUE(box.pool.resident(0, "m"));
  EXPECT_TRUE(box.pool.forget(0));
  EXPECT_FALSE(box.pool.resident(0, "m"));
  EXPECT_EQ(box.pool.used_bytes(0), 0.0);
  JobId id{};
  EXPECT_THROW((void)box.pool.submit(1.0, {}, id), InvalidArgument);
  EXPECT_THROW((void)box.pool.measure(1.0, 0, 0, CostModel::affine(0.0, 1.0), 1), InvalidArgument);
  EXPECT_THROW((void)box.pool.forget(0), InvalidArgument);
  EXPECT_TRUE(std::isnan(box.pool.seconds(0, 0, 1.0)));
  EXPECT_TRUE(box.pool.has_room(0));
  (void)box.pool.add_device(1.0, {.name = "late"});
  EXPECT_EQ(box.pool.add_kind({.name = "new", .sizes = {1, 2}}), 0);
  EXPECT_EQ(box.pool.add_kind({.name = "next", .model = "n", .resident_bytes = 1.0}), 1);
  EXPECT_FALSE(box.pool.resident(0, "n"));
  EXPECT_EQ(box.pool.used_bytes(0), 0.0);
  EXPECT_EQ(box.pool.kind(0).name, "new");
  EXPECT_TRUE(std::isnan(box.pool.seconds(0, 0, 1.0))) << "nothing is known of the new one";
  EXPECT_EQ(box.pool.largest_batch(0, 2), 2);
  (void)box.pool.retire(2.0, 1);
  (void)box.pool.retire(2.0, 2);
  const JobId first = box.submit(2.0);
  const RunId begun = box.last.starts.at(0).run;
  const JobId second = box.submit(2.0, {.kind = 1});
  const JobId third = box.submit(2.0);
  PoolStart start = box.pool.withdraw(2.0, begun, first).starts.at(0);
  EXPECT_EQ(start.jobs, Jobs{second});
  EXPECT_EQ(start.kind, 1);
  start = box.finish(3.0, start).starts.at(0);
  EXPECT_EQ(start.jobs, Jobs{third});
  EXPECT_EQ(start.kind, 0);
}

TEST(PoolKinds, LetOthersKeepTheModelThatTheyShare) {
  Box box({1.0}, {}, {.name = "a", .model = "m", .resident_bytes = 3.0});
  (void)box.pool.add_kind({.name = "b", .model = "m", .resident_bytes = 3.0});
  (void)box.submit(0.0);
  (void)box.finish(1.0, box.last.starts.at(0));
  EXPECT_TRUE(box.pool.forget(0));
  EXPECT_TRUE(box.pool.resident(0, "m"));
  EXPECT_TRUE(box.pool.forget(1));
  EXPECT_FALSE(box.pool.resident(0, "m"));
}

TEST(PoolKinds, MayBeUnloadedFromOneDeviceAndLoadAgain) {
  Box box({1.0, 1.0}, {.placement = Placement::any},
          {.name = "a", .model = "m", .resident_bytes = 3.0, .reload_seconds = 1.0});
  (void)box.submit(0.0);
  const PoolStart first = box.last.starts.at(0);
  (void)box.submit(0.0);
  const PoolStart second = box.last.starts.at(0);
  EXPECT_FALSE(box.pool.unload(0, "m")) << "a batch runs there";
  (void)box.finish(2.0, first);
  EXPECT_FALSE(box.pool.unload(0, "never heard of"));
  EXPECT_TRUE(box.pool.unload(0, "m"));
  EXPECT_FALSE(box.pool.unload(0, "m"));
  EXPECT_FALSE(box.pool.resident(0, "m"));
  EXPECT_EQ(box.pool.used_bytes(0), 0.0);
  EXPECT_TRUE(box.pool.resident(1, "m"));
  EXPECT_THROW((void)box.pool.unload(2, "m"), InvalidArgument);
  (void)box.submit(2.0);
  EXPECT_EQ(box.last.starts.at(0).load_seconds, 1.0);
  EXPECT_TRUE(box.pool.resident(0, "m"));
  (void)box.finish(3.0, second);
}

// What is counted without being there would cost another model its place.
TEST(PoolKinds, ThatAreUnloadedTakeNoRoomOfOthers) {
  for (const bool unloaded : {false, true}) {
    PoolState pool;
    (void)pool.add_device(0.0, {.name = "d", .memory_bytes = 10.0});
    for (const char* const name : {"stays", "gone", "new"})
      (void)pool.add_kind({.name = name, .model = name, .resident_bytes = 4.0, .reload_seconds = 1.0});
    PoolDecisions last;
    for (const std::size_t kind : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
      const bool now = kind == 2 && unloaded;
      EXPECT_EQ(now && pool.unload(0, "gone"), now);
      JobId id{};
      last = pool.submit(0.0, {.kind = kind}, id);
      (void)pool.finish(0.0, last.starts.at(0).run, RunResult::completed, 1.0);
    }
    EXPECT_EQ(last.starts.at(0).evict.size(), unloaded ? 0 : 1);
    EXPECT_EQ(pool.resident(0, "stays"), unloaded);
  }
}

}  // namespace
}  // namespace paceline::plan::testing
