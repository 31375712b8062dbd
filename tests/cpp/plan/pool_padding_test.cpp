// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "plan/pool/padding.hpp"
#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

using Indices = std::vector<std::size_t>;

// Jobs to cut, in eighths so that sums in another order have the same bits.
struct Cut {
  explicit Cut(std::uint64_t seed) {
    Draws draws(seed);
    model = CostModel::affine(0.125 * static_cast<double>(draws.integer(0, 16)),
                              0.125 * static_cast<double>(draws.integer(0, 4)));
    for (std::size_t job = draws.count(1, 7); job > 0; --job)
      costs.push_back(0.125 * static_cast<double>(draws.chance(0.5) ? draws.integer(1, 40) : draws.integer(1, 4)));
    if (draws.chance(0.5)) sizes = {1, 2, 4};
  }
  [[nodiscard]] double seconds(const Indices& batch) const {
    double largest = 0.0;
    for (const std::size_t job : batch) largest = std::max(largest, costs[job]);
    return model.fixed_seconds() + model.per_item_seconds() * largest * static_cast<double>(batch.size());
  }
  // The least seconds of the jobs from `job` on, joined to batches or in new ones, over all ways.
  [[nodiscard]] double least(std::vector<Indices>& batches, std::size_t job) const {
    if (job == costs.size()) {
      double sum = 0.0;
      for (const Indices& batch : batches) {
        if (std::ranges::count(sizes, std::ssize(batch)) == 0) return std::numeric_limits<double>::infinity();
        sum += seconds(batch);
      }
      return sum;
    }
    double best = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < batches.size(); ++i) {
      batches[i].push_back(job);
      best = std::min(best, least(batches, job + 1));
      batches[i].pop_back();
    }
    batches.push_back({job});
    best = std::min(best, least(batches, job + 1));
    batches.pop_back();
    return best;
  }
  // What is wrong with a first batch; "" if nothing is.
  [[nodiscard]] std::string problem(const Indices& batch) const {
    if (batch.empty() || batch.front() != 0 || !std::ranges::is_sorted(batch)) return "the first job is not in it";
    if (std::ranges::count(sizes, std::ssize(batch)) == 0) return "a size that is not allowed";
    Cut rest = *this;
    for (auto job = batch.rbegin(); job != batch.rend(); ++job)
      rest.costs.erase(rest.costs.begin() + static_cast<std::ptrdiff_t>(*job));
    std::vector<Indices> none;
    const double best = least(none, 0);
    return seconds(batch) + rest.least(none, 0) > best ? "another first batch leads to less" : "";
  }
  CostModel model;
  std::vector<double> costs;
  std::vector<std::int64_t> sizes = {1, 2, 3};
};

TEST(PoolPadding, CutsJobsAsEnumerationDoes) {
  int parted = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Cut cut(seed);
    const Indices found = first_padded_batch(cut.costs, cut.model, cut.sizes);
    ASSERT_EQ(cut.problem(found), "") << "seed " << seed;
    parted += found.back() + 1 != found.size() ? 1 : 0;  // jobs between were left out
  }
  EXPECT_GT(parted, 200);
}

// Jobs as they come, as many as may be.
TEST(PoolPadding, EnumerationNoticesACutThatIgnoresThePadding) {
  int noticed = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    const Cut cut(seed);
    Indices next;
    while (next.size() < cut.costs.size() && std::ssize(next) < cut.sizes.back()) next.push_back(next.size());
    noticed += cut.problem(next) == "another first batch leads to less" ? 1 : 0;
  }
  EXPECT_GT(noticed, 100);
}

PoolKind padded(std::vector<std::int64_t> sizes = {1, 2, 4}) {
  return {.name = "work", .sizes = std::move(sizes), .padded = true};
}

// A device that takes `fixed` seconds and one for each unit of cost, which is busy while these jobs come.
PoolStart next_batch(double fixed, const std::vector<double>& costs, Jobs& jobs) {
  Box box({1.0}, {}, padded());
  (void)box.pool.measure(0.0, 0, 0, CostModel::affine(fixed, 1.0), 3);
  box.submit(0.0);
  const PoolStart running = box.last.starts.at(0);
  for (const double cost : costs) jobs.push_back(box.submit(0.0, {.cost = cost}));
  return box.finish(1.0, running).starts.at(0);
}

TEST(PoolPadding, TakesJobsOfLikeCostsTogetherAndTheFirstAlways) {
  Jobs jobs;
  const PoolStart start = next_batch(0.5, {1.0, 9.0, 1.0, 9.5, 1.0}, jobs);
  EXPECT_EQ(start.jobs, (Jobs{jobs[0], jobs[2]}));
  EXPECT_EQ(start.cost, 2.0);
  EXPECT_EQ(start.predicted_seconds, 2.5);
}

TEST(PoolPadding, PadsWhereABatchOfItsOwnWouldTakeLonger) {
  Jobs jobs;
  const PoolStart start = next_batch(20.0, {1.0, 2.0, 3.0, 4.0}, jobs);
  EXPECT_EQ(start.jobs, jobs);
  EXPECT_EQ(start.cost, 16.0);
}

TEST(PoolPadding, LeavesALongJobToTheFasterDevice) {
  Box box({1.0, 4.0}, {}, padded({1, 2}));
  box.submit(0.0);
  ASSERT_EQ(devices_of(box.last), (Devices{0}));
  const PoolStart running = box.last.starts[0];
  const JobId lengthy = box.submit(0.0, {.cost = 8.0});  // 1 + 8 s there, 32 s here
  EXPECT_TRUE(box.last.starts.empty());
  EXPECT_EQ(box.last.declines.at(0).reason, PoolReason::faster_devices);
  EXPECT_EQ(box.finish(1.0, running).starts.at(0).jobs, (Jobs{lengthy}));
}

// The plan counts typical jobs, of which the others could end many until this one has ended.
TEST(PoolPadding, StartsALongJobWhereItEndsFirstWhateverIsTypical) {
  Box equal({1.0, 1.0, 1.0}, {}, padded());
  Box unlike({1.0, 1.0}, {}, padded());
  (void)unlike.pool.measure(0.0, 1, 0, CostModel::affine(5.0, 0.125), 3);  // the slower one for typical jobs
  for (Box* box : {&equal, &unlike}) {
    for (int job = 0; job < 20; ++job) {
      box->submit(0.0);
      while (box->pool.running() > 0) box->finish(0.0, box->last.starts.at(0));
    }
    box->submit(0.0, {.cost = 100.0});
    EXPECT_EQ(devices_of(box->last), (Devices{box == &equal ? 0U : 1U}));
  }
}

TEST(PoolPadding, CountsTheOwnCostOfAJobForItsDeadline) {
  Box box({1.0}, {}, padded());
  box.submit(0.0, {.deadline_seconds = 5.0, .cost = 4.0});  // 1.3 * 4
  EXPECT_EQ(box.last.ends.at(0).reason, PoolReason::deadline);
  const JobId first = box.submit(0.0, {.deadline_seconds = 5.0, .cost = 2.0});
  EXPECT_EQ(box.last.starts.at(0).jobs, (Jobs{first}));
  const PoolStart running = box.last.starts[0];
  // Both together would end at 2 + 1.3 * 4, one at 2 + 1.3 * 2.
  const JobId timed = box.submit(0.0, {.deadline_seconds = 7.0, .cost = 2.0});
  box.submit(0.0, {.priority = Priority::batch, .cost = 2.0});
  EXPECT_EQ(box.finish(2.0, running).starts.at(0).jobs, (Jobs{timed}));
  const JobId expires = box.submit(2.0, {.deadline_seconds = 8.0, .cost = 3.0});
  EXPECT_NEAR(box.last.wake_seconds, 10.0 - 3.9, 1e-9);
  EXPECT_EQ(box.pool.tick(box.last.wake_seconds).ends.at(0).job, expires);
}

TEST(PoolPadding, LetsASlowDeviceTakeALaterJobThatItCanEndInTime) {
  for (const Placement placement : {Placement::any, Placement::automatic}) {
    Box box({1.0, 4.0}, {.placement = placement}, padded());
    box.submit(0.0);
    box.submit(0.0, {.deadline_seconds = 5.0, .cost = 2.0});  // 1.3 * 8 there
    EXPECT_TRUE(box.last.starts.empty());
    const JobId later = box.submit(0.0, {.deadline_seconds = 6.0, .cost = 0.125});
    ASSERT_EQ(devices_of(box.last), (Devices{1}));
    EXPECT_EQ(box.last.starts[0].jobs, (Jobs{later}));
  }
}

TEST(PoolPadding, RefusesCostsThatMakeNoSense) {
  Box box({1.0}, {}, padded());
  for (const double cost : {0.0, -1.0, 1e13, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THROW(box.submit(0.0, {.cost = cost}), InvalidArgument);
  Box plain({1.0});
  EXPECT_THROW(plain.submit(0.0, {.cost = 2.0}), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan::testing
