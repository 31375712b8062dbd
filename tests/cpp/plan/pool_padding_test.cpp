// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "plan/pool/cost_window.hpp"
#include "plan/pool/job_slots.hpp"
#include "plan/pool/key_queue.hpp"
#include "plan/pool/padding.hpp"
#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

using Indices = std::vector<std::size_t>;

template <class Value>
Value pick(Draws& draws, std::initializer_list<Value> values) {
  return values.begin()[draws.count(0, values.size() - 1)];
}

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

// The batch with the first job. `costs` are in the order of the queue.
Indices first_padded_batch(const std::vector<double>& costs, const CostModel& model,
                           const std::vector<std::int64_t>& sizes, PaddedCuts& cuts) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t job = 0; job < costs.size(); ++job) order.emplace_back(costs[job], job);
  std::ranges::sort(order);
  std::vector<double> ascending;
  for (const auto& [cost, job] : order) ascending.push_back(cost);
  const auto first = std::ranges::find(order, std::size_t{0}, &std::pair<double, std::size_t>::second) - order.begin();
  const auto [begin, end] = cuts.batch_at(ascending, static_cast<std::size_t>(first), model, sizes);
  Indices batch;
  for (std::size_t i = begin; i < end; ++i) batch.push_back(order[i].second);
  std::ranges::sort(batch);
  return batch;
}

TEST(PoolPadding, CutsJobsAsEnumerationDoes) {
  PaddedCuts cuts;
  int parted = 0;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Cut cut(seed);
    const Indices found = first_padded_batch(cut.costs, cut.model, cut.sizes, cuts);
    ASSERT_EQ(cut.problem(found), "") << "seed " << seed;
    parted += found.back() + 1 != found.size() ? 1 : 0;  // jobs between were left out
  }
  EXPECT_GT(parted, 200);
}

// The same sums, with the sizes noted.
std::pair<std::size_t, std::size_t> cut_with_sizes(const std::vector<double>& costs, std::size_t place,
                                                   const CostModel& model, const std::vector<std::int64_t>& sizes) {
  std::vector<double> rest(costs.size() + 1, 0.0);
  std::vector<std::size_t> taken(costs.size());
  for (std::size_t from = costs.size(); from-- > 0;) {
    rest[from] = std::numeric_limits<double>::infinity();
    for (const std::int64_t size : sizes) {
      const std::size_t end = from + static_cast<std::size_t>(size);
      if (end > costs.size()) break;
      const double seconds = seconds_of(model, static_cast<double>(size) * costs[end - 1]) + rest[end];
      if (seconds <= rest[from]) taken[from] = static_cast<std::size_t>(size);
      rest[from] = std::min(rest[from], seconds);
    }
  }
  std::size_t from = 0;
  while (from + taken[from] <= place) from += taken[from];
  return {from, from + taken[from]};
}

TEST(PoolPadding, CutsManyJobsAsNotingTheSizesDoes) {
  PaddedCuts cuts;
  std::set<std::size_t> found;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Draws draws(seed);
    const CostModel model = CostModel::affine(pick(draws, {0.0, 1e-3, 0.1, 10.0, 1e4}), pick(draws, {0.0, 1e-9, 1.0}));
    std::vector<double> costs;
    for (std::size_t job = draws.count(1, 300); job > 0; --job)
      costs.push_back(draws.chance(0.2) ? 3.0 : std::exp(draws.real(-3.0, 6.0)));
    std::ranges::sort(costs);
    const std::vector<std::int64_t> sizes = batch_sizes(draws.integer(1, 80));
    const std::size_t place = draws.count(0, costs.size() - 1);
    const auto batch = cuts.batch_at(costs, place, model, sizes);
    ASSERT_EQ(batch, cut_with_sizes(costs, place, model, sizes)) << "seed " << seed;
    found.insert(batch.second - batch.first);
  }
  EXPECT_GT(found.size(), 12);
}

// Jobs come and go at random, and windows of several lengths are asked for.
TEST(PoolPadding, TheWindowHasTheFirstJobsByTheirCosts) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Draws draws(seed);
    JobSlots jobs;
    KeyQueue timed;
    KeyQueue plain;
    CostWindow window;
    std::vector<JobId> all;
    const std::int64_t most = pick<std::int64_t>(draws, {5, 80, 3000});
    for (int event = 0; event < 6000; ++event) {
      if (draws.chance(std::ssize(all) < most ? 0.7 : 0.4)) {
        PoolEntry made{.id = jobs.next(), .deadline = draws.chance(0.3) ? draws.real(0.0, 9.0) : kNever};
        made.key = made.timed() ? made.deadline : draws.real(0.0, 9.0) + 1e-3 * event;
        made.cost = 0.25 * static_cast<double>(draws.integer(1, 40));
        const PoolEntry& job = jobs.add(made);
        (job.timed() ? timed : plain).insert({job.key, job.id});
        window.insert(job);
        all.push_back(job.id);
      } else if (!all.empty()) {
        const std::size_t place = draws.count(0, all.size() - 1);
        PoolEntry& job = jobs.at(all[place]);
        (job.timed() ? timed : plain).erase({job.key, job.id});
        window.erase(job);
        jobs.erase(job);
        all[place] = all.back();
        all.pop_back();
      }
      if (!draws.chance(0.1)) continue;
      std::vector<CostEntry> wanted;
      for (const JobId id : all) wanted.emplace_back(jobs.at(id));
      std::ranges::sort(wanted, std::less<>(), &CostEntry::key);
      const std::size_t count = pick<std::size_t>(draws, {1, 16, 64, 256, CostWindow::kMost});
      wanted.resize(std::min(wanted.size(), count), CostEntry(PoolEntry{}));
      const auto ids = [](std::span<const CostEntry> entries) {
        std::vector<JobId> found;
        for (const CostEntry& one : entries) found.push_back(one.key.id);
        return found;
      };
      std::vector<CostEntry> few(wanted.begin(), wanted.begin() + std::ssize(wanted) / 2);
      std::ranges::sort(wanted, std::less<>());
      const auto found = window.first(count, timed, plain, jobs);
      ASSERT_EQ(ids(found), ids(wanted)) << "seed " << seed << ", event " << event;
      if (few.empty()) continue;
      std::ranges::sort(few, std::less<>());
      ASSERT_EQ(ids(window.smallest(found, few.size())), ids(few)) << "seed " << seed << ", event " << event;
    }
  }
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
