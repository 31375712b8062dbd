// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

namespace paceline::plan {
namespace {

// Three devices of speeds 1, 1 and 0.5; the first two have the label "fast".
struct LoadedPool {
  LoadedPool() {
    for (std::size_t d = 0; d < 3; ++d) {
      const std::string name = "d" + std::to_string(d);
      const std::vector<std::string> labels(d < 2 ? 1 : 0, "fast");
      (void)pool.add_device(0.0, {.name = name, .device_class = name, .labels = labels});
    }
    kind = pool.add_kind({.name = "score", .sizes = {1, 2}, .queue_limit = 100});
    fast = pool.add_need({.labels = {"fast"}});
  }

  void measure() {
    for (std::size_t d = 0; d < 3; ++d) (void)pool.measure(0.0, d, kind, CostModel::affine(0.0, d < 2 ? 0.1 : 0.2), 3);
  }
  JobId submit(double now, PoolJob job = {}) {
    JobId id{};
    job.kind = kind;
    (void)pool.submit(now, job, id);
    return id;
  }

  PoolState pool;
  std::size_t kind = 0;
  std::size_t fast = 0;
};

// Measured. A tenant has a quota of so many devices, and so many are retired.
struct QuotaPool : LoadedPool {
  QuotaPool(std::int64_t quota, std::size_t retired) {
    measure();
    tenant = pool.add_tenant({.name = "tenant", .devices = quota});
    for (std::size_t d = 0; d < retired; ++d) (void)pool.retire(0.0, d);
  }
  [[nodiscard]] double arrived() const { return pool.loads()[0].arrived; }
  [[nodiscard]] double waiting() const { return pool.loads()[0].waiting; }

  std::size_t tenant = 0;
};

TEST(PoolLoads, CountWhatComesAndWhatMayStart) {
  LoadedPool box;
  (void)box.submit(0.0);
  EXPECT_EQ(box.pool.loads()[0].arrived, 1.0);
  EXPECT_EQ(box.pool.loads()[0].rates, (std::vector<double>{0.0, 0.0, 0.0})) << "no device has run any";
  box.measure();
  for (int n = 0; n < 9; ++n) (void)box.submit(0.0);
  (void)box.submit(0.0, {.not_before_seconds = 100.0});
  (void)box.submit(0.0, {.gang = 3});
  const PoolLoad load = box.pool.loads()[0];
  EXPECT_EQ(load.arrived, 13.0) << "a gang counts for each of its devices, and what is not due not at all";
  EXPECT_NEAR(load.rates[0], 10.0, 1e-9);
  EXPECT_NEAR(load.rates[2], 5.0, 1e-9);
  EXPECT_LE(load.waiting, 10.0) << "not what is not due, nor what runs";
  EXPECT_GE(load.waiting, 3.0);
  (void)box.pool.retire(0.0, 0);
  EXPECT_NEAR(box.pool.loads()[0].rates[0], 10.0, 1e-9) << "it may come back";
  (void)box.pool.lose(0.0, 0);
  EXPECT_EQ(box.pool.loads()[0].rates[0], 0.0);
  EXPECT_TRUE(box.pool.lost(0));
}

TEST(PoolLoads, TakeADeviceThatHasRunNoneForOneLikeTheOthers) {
  LoadedPool box;
  (void)box.pool.measure(0.0, 0, box.kind, CostModel::affine(0.0, 0.1), 3);
  (void)box.pool.measure(0.0, 1, box.kind, CostModel::affine(0.0, 0.3), 3);
  EXPECT_NEAR(box.pool.loads()[0].rates[2], (10.0 + 10.0 / 3.0) / 2.0, 1e-9);
  (void)box.pool.lose(0.0, 2);
  EXPECT_EQ(box.pool.loads()[0].rates[2], 0.0);
}

TEST(PoolLoads, CountWhatComesWhenItCouldRunAndAlsoWhoGaveUp) {
  LoadedPool box;
  box.measure();
  for (std::size_t d = 0; d < 3; ++d) (void)box.pool.retire(0.0, d);
  const JobId first = box.submit(0.0);
  (void)box.submit(0.0, {.not_before_seconds = 100.0});
  (void)box.submit(0.0, {.after = {first}});
  EXPECT_EQ(box.pool.loads()[0].arrived, 1.0);
  bool cancelled = false;
  (void)box.pool.cancel(1.0, first, cancelled);
  EXPECT_EQ(box.pool.loads()[0].arrived, 1.0) << "it came, and the one after it never could run";
  EXPECT_EQ(box.pool.loads()[0].waiting, 0.0) << "it waits no more";
  (void)box.pool.tick(100.0);
  EXPECT_EQ(box.pool.loads()[0].arrived, 2.0);
  for (int n = 0; n < 100; ++n) (void)box.submit(100.0);
  EXPECT_EQ(box.pool.loads()[0].arrived, 102.0) << "one of them was refused: the queue was full";
  EXPECT_EQ(box.pool.loads()[0].waiting, 100.0);
}

TEST(PoolLoads, CountOfATenantWhatItsQuotaLetsRun) {
  QuotaPool box(1, 3);
  for (int n = 0; n < 20; ++n) (void)box.submit(0.0, {.need = n % 2 == 0 ? 0 : box.fast, .tenant = box.tenant});
  EXPECT_EQ(box.waiting(), 2.0) << "a batch on one device, whatever the need";
  EXPECT_EQ(box.arrived(), 0.0);
  for (int n = 0; n < 5; ++n) (void)box.submit(0.0);
  EXPECT_EQ(box.waiting(), 7.0);
  EXPECT_EQ(box.arrived(), 5.0);
  (void)box.pool.restore(1.0, 0);
  (void)box.pool.restore(1.0, 1);
  EXPECT_LE(box.arrived(), 7.0) << "what of the tenant has started";
  EXPECT_LE(box.waiting(), 5.0);
}

TEST(PoolLoads, CountOfATenantWithAQuotaAlsoWhatNoDeviceServed) {
  QuotaPool box(1, 2);
  (void)box.submit(0.0, {.need = box.fast, .deadline_seconds = 10.0, .tenant = box.tenant});
  EXPECT_EQ(box.arrived(), 0.0);
  (void)box.pool.tick(11.0);
  EXPECT_EQ(box.arrived(), 1.0) << "it has expired";
  EXPECT_EQ(box.pool.covers(10.5).size(), 1U);
  (void)box.submit(11.0, {.deadline_seconds = 1e-3, .tenant = box.tenant});
  EXPECT_EQ(box.arrived(), 2.0) << "it was refused for its deadline";
  (void)box.submit(11.0, {.deadline_seconds = 5.0 + 1e-3, .not_before_seconds = 5.0, .tenant = box.tenant});
  (void)box.submit(11.0, {.deadline_seconds = 5.0 + 1e-3, .not_before_seconds = 5.0});
  EXPECT_EQ(box.arrived(), 2.0) << "they were not due";
  (void)box.submit(12.0, {.tenant = box.tenant});
  (void)box.submit(12.0, {.deadline_seconds = 1e-3, .tenant = box.tenant});
  EXPECT_EQ(box.arrived(), 3.0) << "the quota is used";
}

// What waits of a tenant is served before what is turned away. What its quota leaves to that is counted.
TEST(PoolLoads, CountWhatIsTurnedAwayOnlyIfTheQuotaHoldsItBesideWhatWaits) {
  QuotaPool box(2, 2);
  const auto refuse = [&] { (void)box.submit(0.0, {.deadline_seconds = 1e-3, .tenant = box.tenant}); };
  (void)box.submit(0.0, {.need = box.fast, .tenant = box.tenant});
  refuse();
  EXPECT_EQ(box.arrived(), 1.0) << "one waits, and the quota has two devices";
  for (int n = 0; n < 20; ++n) (void)box.submit(0.0, {.need = box.fast, .tenant = box.tenant});
  refuse();
  EXPECT_EQ(box.arrived(), 1.0) << "others use both";
  (void)box.submit(0.0, {.need = box.fast, .deadline_seconds = 10.0, .tenant = box.tenant});
  (void)box.pool.tick(11.0);
  EXPECT_EQ(box.arrived(), 1.0) << "also of what expires";
}

TEST(PoolLoads, CountAGangThatIsTurnedAwayOnlyIfTheQuotaHoldsItBesideWhatWaits) {
  QuotaPool box(2, 3);
  const auto arrived_when_expired = [&](double now, std::int64_t gang) {
    (void)box.submit(now, {.deadline_seconds = 1.0, .gang = gang, .tenant = box.tenant});
    (void)box.pool.tick(now + 2.0);
    return box.arrived();
  };
  EXPECT_EQ(arrived_when_expired(0.0, 2), 2.0);
  (void)box.submit(2.0, {.gang = 2, .tenant = box.tenant});
  EXPECT_EQ(arrived_when_expired(2.0, 2), 2.0) << "the one that waits uses both";
  EXPECT_EQ(arrived_when_expired(4.0, 1), 2.0);
}

TEST(PoolLoads, CountAllOfATenantWhoseQuotaHoldsNothingBack) {
  QuotaPool box(3, 3);
  for (int n = 0; n < 20; ++n) (void)box.submit(0.0, {.tenant = box.tenant});
  EXPECT_EQ(box.arrived(), 20.0);
  EXPECT_EQ(box.waiting(), 20.0);
}

TEST(PoolLoads, TakeARunThatHungForTen) {
  PoolState pool;
  (void)pool.add_device(0.0, {.name = "d"});
  const std::size_t kind = pool.add_kind({.name = "score", .queue_limit = 100});
  (void)pool.measure(0.0, 0, kind, CostModel::affine(0.0, 0.1), 3);
  for (int n = 0; n < 200; ++n) {
    JobId id{};
    const PoolDecisions decided = pool.submit(n, {.kind = kind}, id);
    ASSERT_EQ(decided.starts.size(), 1U);
    (void)pool.finish(n, decided.starts[0].run, RunResult::completed, n == 150 ? 1000.0 : 0.15);
  }
  const PoolLoad load = pool.loads()[0];
  EXPECT_NEAR(load.run_work, 1.0, 1e-12) << "of one job, though it takes longer than the model says";
  EXPECT_GT(load.run_square, 1.1);
  EXPECT_LT(load.run_square, 2.0);
}

// The work of the last runs is what they took at the rates of now, whenever these were measured.
TEST(PoolLoads, TellTheWorkOfRunsByTheModelsOfNow) {
  PoolState pool;
  for (const char* const name : {"fast", "slow"}) (void)pool.add_device(0.0, {.name = name, .device_class = name});
  const std::size_t kind = pool.add_kind({.name = "score", .sizes = {1, 2}, .queue_limit = 100});
  const auto measure = [&](double fast, double slow) {
    (void)pool.measure(0.0, 0, kind, CostModel::affine(0.0, fast), 3);
    (void)pool.measure(0.0, 1, kind, CostModel::affine(0.0, slow), 3);
  };
  measure(1.0, 1.0);  // before anything is known of them
  std::array<double, 2> seconds = {};
  for (int n = 0; n < 30; ++n) {
    (void)pool.retire(0.0, n % 3 == 0 ? 0 : 1);
    JobId id{};
    const PoolDecisions decided = pool.submit(0.0, {.kind = kind}, id);
    ASSERT_EQ(decided.starts.size(), 1U);
    const double took = n % 3 == 0 ? 4.0 : 1.0;  // on the slow one
    seconds[n % 3 == 0 ? 1 : 0] += took / 30.0;
    (void)pool.finish(0.0, decided.starts[0].run, RunResult::completed, took);
    (void)pool.restore(0.0, n % 3 == 0 ? 0 : 1);
  }
  const auto work = [&] { return pool.loads()[0].run_work; };
  EXPECT_NEAR(work(), seconds[0] + seconds[1], 1e-9);
  measure(0.5, 2.0);
  EXPECT_NEAR(work(), seconds[0] / 0.5 + seconds[1] / 2.0, 1e-9);
  measure(0.5, 4.0);
  EXPECT_NEAR(work(), seconds[0] / 0.5 + seconds[1] / 4.0, 1e-9);
  (void)pool.lose(0.0, 1);
  EXPECT_NEAR(work(), seconds[0] / 0.5 + seconds[1], 1e-9) << "at the rate of its last run";
}

TEST(PoolCovers, NeedNoDeviceForWhatAQuotaHoldsBack) {
  QuotaPool box(1, 2);
  (void)box.submit(0.0, {.tenant = box.tenant});
  (void)box.submit(1.0, {.need = box.fast, .tenant = box.tenant});
  EXPECT_TRUE(box.pool.covers(0.0).empty()) << "the tenant uses the third device";
  (void)box.submit(2.0, {.need = box.fast});
  EXPECT_EQ(box.pool.covers(5.0).size(), 1U);
}

TEST(PoolCovers, AreWhatWaitsAndNeedsOfLate) {
  LoadedPool box;
  box.measure();
  EXPECT_TRUE(box.pool.covers(0.0).empty());
  for (std::size_t d = 0; d < 3; ++d) (void)box.pool.retire(1.0, d);
  (void)box.submit(2.0);
  EXPECT_TRUE(box.pool.covers(0.0).empty()) << "whichever is active will do";
  const JobId gang = box.submit(3.0, {.gang = 2});
  ASSERT_EQ(box.pool.covers(0.0).size(), 1U);
  EXPECT_EQ(box.pool.covers(0.0)[0].count, 2U);
  bool cancelled = false;
  (void)box.pool.cancel(3.0, gang, cancelled);
  const JobId job = box.submit(4.0, {.need = box.fast});
  ASSERT_EQ(box.pool.covers(4.5).size(), 1U) << "it waits";
  EXPECT_EQ(box.pool.covers(4.5)[0].devices, (std::vector<bool>{true, true, false}));
  (void)box.pool.lose(5.0, 0);
  EXPECT_EQ(box.pool.covers(4.5)[0].devices, (std::vector<bool>{false, true, false}));
  (void)box.pool.cancel(5.0, job, cancelled);
  EXPECT_TRUE(box.pool.covers(4.5).empty());
  EXPECT_EQ(box.pool.covers(3.5).size(), 1U) << "it had the need half a second ago";
}

}  // namespace
}  // namespace paceline::plan
