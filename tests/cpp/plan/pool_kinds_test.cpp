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

}  // namespace
}  // namespace paceline::plan::testing
