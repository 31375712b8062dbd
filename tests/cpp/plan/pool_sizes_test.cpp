// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/plan/pool.hpp>
#include <paceline/plan/random.hpp>

#include "pool_box.hpp"

namespace paceline::plan::testing {
namespace {

const std::vector<std::int64_t> kSizes{1, 2, 4, 8};

/// Devices with the line 1 + size as their model.
struct Sized {
  explicit Sized(std::size_t devices = 1) {
    (void)pool.add_kind({.name = "batches", .sizes = kSizes});
    for (std::size_t d = 0; d < devices; ++d) {
      (void)pool.add_device(0.0, {.name = "d" + std::to_string(d), .device_class = "class " + std::to_string(d)});
      (void)pool.measure(0.0, d, 0, CostModel::affine(1.0, 1.0), 3);
    }
  }
  /// Starts so many jobs that nothing else competes for, and ends them after `seconds`. Returns what was predicted.
  double run(std::int64_t size, double seconds) {
    const PoolStart blocker = start(1);
    JobId id{};
    for (std::int64_t k = 0; k < size; ++k) (void)pool.submit(now, {}, id);
    now += 2.0;
    const PoolDecisions out = pool.finish(now, blocker.run, RunResult::completed, 2.0);
    EXPECT_EQ(out.starts.size(), 1U);
    EXPECT_EQ(std::ssize(out.starts.at(0).jobs), size);
    now += seconds;
    EXPECT_TRUE(pool.finish(now, out.starts.at(0).run, RunResult::completed, seconds).starts.empty());
    return out.starts.at(0).predicted_seconds;
  }
  PoolStart start(std::size_t count) {
    JobId id{};
    PoolDecisions out;
    for (std::size_t k = 0; k < count; ++k) out = pool.submit(now, {}, id);
    EXPECT_EQ(out.starts.size(), 1U);
    return out.starts.at(0);
  }
  PoolState pool;
  double now = 0.0;
};

TEST(PoolSizes, ThatTakeLongerThanTheLineThreeTimesTakeWhatTheyTook) {
  Sized one;
  EXPECT_EQ(one.run(4, 13.0), 5.0);
  EXPECT_EQ(one.run(4, 11.0), 5.0);
  EXPECT_EQ(one.run(4, 12.0), 5.0);
  EXPECT_EQ(one.run(4, 12.0), 12.0) << "the median";
  EXPECT_EQ(one.run(2, 3.0), 3.0) << "others are on the line";
  EXPECT_EQ(one.run(8, 9.0), 9.0);
}

TEST(PoolSizes, NoiseOnBothSidesOfTheLineIsNoTime) {
  Sized one;
  for (const double seconds : {10.0, 2.0, 11.0, 2.5, 10.0, 3.0}) EXPECT_EQ(one.run(4, seconds), 5.0);
  for (const double seconds : {5.4, 5.3, 5.4, 4.7}) EXPECT_EQ(one.run(4, seconds), 5.0) << "a tenth is none, either";
}

TEST(PoolSizes, AreForgottenWhenTheyHaveNotRunForLong) {
  Sized one;
  for (int k = 0; k < 3; ++k) (void)one.run(4, 12.0);
  for (int k = 0; k < 100; ++k) (void)one.run(2, 3.0);
  EXPECT_EQ(one.run(4, 12.0), 12.0);
  for (int k = 0; k < 130; ++k) (void)one.run(2, 3.0);
  EXPECT_EQ(one.run(4, 12.0), 5.0);
}

TEST(PoolSizes, ANewLineIsComparedWithWhatTheyTook) {
  Sized one;
  for (int k = 0; k < 3; ++k) (void)one.run(4, 12.0);
  (void)one.pool.measure(one.now, 0, 0, CostModel::affine(0.0, 3.0), 30);
  EXPECT_EQ(one.run(4, 12.0), 12.0);
  EXPECT_EQ(one.run(8, 24.0), 24.0) << "by the new line";
}

TEST(PoolSizes, OneJobAloneNeverTakesLongerThanTheLineSoThatDeadlinesAreTakenAgain) {
  Sized one;
  for (int k = 0; k < 6; ++k) {
    const PoolStart slow = one.start(1);
    one.now += 20.0;
    (void)one.pool.finish(one.now, slow.run, RunResult::completed, 20.0);
  }
  JobId id{};
  const PoolDecisions out = one.pool.submit(one.now, {.deadline_seconds = 100.0}, id);
  ASSERT_EQ(out.starts.size(), 1U);
  EXPECT_EQ(out.starts[0].predicted_seconds, 2.0);
}

TEST(PoolSizes, ADeviceThatEndsNoJobAloneInTimeIsLeftNoneWithADeadline) {
  // Device 1 takes long for all sizes but 8. Both are idle when the other seven wait, whose deadline it would miss
  // alone.
  Sized two(2);
  ASSERT_TRUE(two.pool.retire(two.now, 0).starts.empty());
  (void)two.pool.measure(two.now, 1, 0, CostModel::affine(10.0, 0.0), 3);
  for (int k = 0; k < 3; ++k) {
    JobId id{};
    const PoolStart first = two.start(1);
    for (int more = 0; more < 8; ++more) (void)two.pool.submit(two.now, {}, id);
    two.now += 10.0;
    const PoolDecisions out = two.pool.finish(two.now, first.run, RunResult::completed, 10.0);
    ASSERT_EQ(out.starts.at(0).jobs.size(), 8U);
    two.now += 5.0;
    ASSERT_TRUE(two.pool.finish(two.now, out.starts[0].run, RunResult::completed, 5.0).starts.empty());
  }
  (void)two.pool.measure(two.now, 0, 0, CostModel::affine(8.0, 0.0), 3);
  (void)two.pool.restore(two.now, 0);
  const PoolStart a = two.start(1);
  const PoolStart b = two.start(1);
  JobId id{};
  for (int k = 0; k < 8; ++k) {
    ASSERT_TRUE(two.pool.submit(two.now, {.deadline_seconds = 22.0}, id).starts.empty());
  }
  two.now += 10.0;
  std::size_t started = two.pool.finish(two.now, a.run, RunResult::completed, 8.0).starts.size();
  started += two.pool.finish(two.now, b.run, RunResult::completed, 10.0).starts.size();
  EXPECT_GT(started, 0U) << "each device leaves them to the other one";
}

// The plan by enumeration: with two devices, the largest size that the free one ends by the least time in which both,
// the other one from when it is free, can end all that wait.
TEST(PoolSizes, ThePlanTakesTheSizeThatEnumerationFinds) {
  std::int64_t avoided = 0;
  for (int script = 0; script < 400; ++script) {
    Random random(3, static_cast<std::uint64_t>(script), 0);
    Sized two(2);
    std::vector<double> table;
    for (const std::int64_t size : kSizes)
      table.push_back((1.0 + static_cast<double>(size)) * (1.2 + 1.8 * random.uniform()));
    table.front() = 2.0;  // as the jobs before each of these took
    // Both devices learn the table: each size three times, by jobs that are bound to nothing.
    for (std::size_t k = 0; k < 3; ++k) {
      for (std::size_t place = 0; place < kSizes.size(); ++place) {
        for (std::size_t d = 0; d < 2; ++d) {
          ASSERT_TRUE(two.pool.retire(two.now, 1 - d).starts.empty());
          (void)two.run(kSizes[place], table[place]);
          (void)two.pool.restore(two.now, 1 - d);
        }
      }
    }
    const auto seconds = [&](std::int64_t size) {
      return table[static_cast<std::size_t>(std::ranges::find(kSizes, size) - kSizes.begin())];
    };
    // The first job runs on one device, which is late or early; the other one is held until all the others wait.
    JobId id{};
    const PoolDecisions a = two.pool.submit(two.now, {}, id);
    const PoolDecisions b = two.pool.submit(two.now, {}, id);
    ASSERT_EQ(a.starts.size() + b.starts.size(), 2U);
    const auto waiting = static_cast<std::int64_t>(1.0 + 7.0 * random.uniform());
    for (std::int64_t k = 0; k < waiting; ++k) ASSERT_TRUE(two.pool.submit(two.now, {}, id).starts.empty());
    const double at = two.now + random.uniform() * seconds(1);
    const double free = std::max(two.now + b.starts.at(0).predicted_seconds - at, 0.0);
    const PoolDecisions out = two.pool.finish(at, a.starts.at(0).run, RunResult::completed, seconds(1));
    std::int64_t top = 0;  // no larger batch can be had
    for (const std::int64_t size : kSizes) top = size <= waiting ? size : top;
    const auto ended = [&](double by) {  // by one device: the largest batches, then the largest one that fits
      double sum = 0.0;
      for (; by >= seconds(top); by -= seconds(top)) sum += static_cast<double>(top);
      double more = 0.0;
      for (const std::int64_t size : kSizes)
        more = size <= top && seconds(size) <= by ? static_cast<double>(size) : more;
      return sum + more;
    };
    std::vector<double> times;  // at which one more batch may have ended
    for (const std::int64_t size : kSizes) {
      for (int full = 0; size <= top && full < 8; ++full) {
        const double time = full * seconds(top) + seconds(size);
        times.insert(times.end(), {time, free + time});
      }
    }
    std::ranges::sort(times);
    const double least = *std::ranges::find_if(times, [&](double time) {
      return ended(time * (1.0 + 1e-9)) + ended((time - free) * (1.0 + 1e-9)) >= static_cast<double>(waiting);
    });
    std::int64_t expected = 0;
    for (const std::int64_t size : kSizes) {
      if (size <= waiting && seconds(size) <= least * (1.0 + 1e-9)) expected = size;
    }
    const std::int64_t took = out.starts.empty() ? 0 : std::ssize(out.starts[0].jobs);
    ASSERT_EQ(took, expected) << "script " << script << ", " << waiting << " wait, the other is free in " << free
                              << "; the sizes take " << ::testing::PrintToString(table);
    avoided += took < top ? 1 : 0;
  }
  EXPECT_GT(avoided, 40);
}

}  // namespace
}  // namespace paceline::plan::testing
