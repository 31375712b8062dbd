// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

#include <paceline/observe/event_ring.hpp>
#include <paceline/observe/history.hpp>
#include <paceline/observe/metrics.hpp>

namespace paceline::observe {
namespace {

TEST(EventRing, KeepsTheLastEventsInOrder) {
  EventRing ring(4);
  for (std::int64_t step = 0; step < 10; ++step) ring.push({.kind = EventKind::step, .step = step});
  const std::vector<TraceEvent> events = ring.snapshot();
  ASSERT_EQ(events.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(events[i].step, static_cast<std::int64_t>(6 + i));
}

TEST(EventRing, TakesEventsFromManyThreads) {
  EventRing ring(64);
  {
    std::vector<std::jthread> writers;
    for (int t = 0; t < 4; ++t) {
      writers.emplace_back([&] {
        for (int i = 0; i < 500; ++i) ring.push({.kind = EventKind::micro_batch});
      });
    }
    for (int i = 0; i < 50; ++i) EXPECT_LE(ring.snapshot().size(), 64u);
  }
  EXPECT_EQ(ring.snapshot().size(), 64u);
}

TEST(Metrics, AddsUpItemsBusyAndIdleTime) {
  MetricsRecorder recorder({"host:0", "host:1"});
  recorder.add({.items = {30, 10}, .busy_seconds = {1.0, 0.5}, .compute_seconds = 1.0, .step_seconds = 1.1});
  recorder.add(
      {.items = {28, 12}, .busy_seconds = {0.9, 0.9}, .compute_seconds = 1.0, .step_seconds = 1.1, .moved = true});
  const Metrics metrics = recorder.snapshot();
  EXPECT_EQ(metrics.steps, 2);
  EXPECT_EQ(metrics.moves, 1);
  EXPECT_EQ(metrics.devices[0].items, 58);
  EXPECT_EQ(metrics.devices[1].last_items, 12);
  EXPECT_DOUBLE_EQ(metrics.devices[1].busy_seconds, 1.4);
  EXPECT_NEAR(metrics.devices[1].idle_seconds, 0.6, 1e-12);
  EXPECT_NEAR(metrics.devices[1].items_per_second, 22 / 1.4, 1e-12);
  EXPECT_NEAR(metrics.imbalance, 1.9 / ((1.9 + 1.4) / 2) - 1, 1e-12);
}

TEST(Metrics, CountsStepsByTheirTime) {
  MetricsRecorder recorder({"host:0"});
  for (const double seconds : {0.0002, 0.001, 0.0011, 0.03, 290.0, 4000.0}) {
    recorder.add({.items = {1}, .busy_seconds = {seconds}, .compute_seconds = seconds, .step_seconds = seconds});
  }
  const auto counts = recorder.snapshot().step_counts;
  EXPECT_EQ(counts[0], 2) << "a bound belongs to its own bucket";
  EXPECT_EQ(counts[1], 1);
  EXPECT_EQ(counts[5], 1) << kStepBounds[5];
  EXPECT_EQ(counts[kStepBounds.size() - 1], 1);
  EXPECT_EQ(counts[kStepBounds.size()], 1);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), 6);
}

TEST(Metrics, SayWhichDevicesGetNoWork) {
  MetricsRecorder recorder({"host:0", "host:1"});
  recorder.set_retired(1, true);
  EXPECT_FALSE(recorder.snapshot().devices[0].retired);
  EXPECT_TRUE(recorder.snapshot().devices[1].retired);
  recorder.set_retired(1, false);
  EXPECT_FALSE(recorder.snapshot().devices[1].retired);
}

TEST(Metrics, TellsCostsOfTheStepsThatHadThem) {
  MetricsRecorder recorder({"host:0", "host:1"});
  recorder.add({.items = {3, 1}, .busy_seconds = {1.0, 2.0}, .costs = {10.0, 40.0}});
  recorder.add({.items = {1, 3}, .busy_seconds = {1.0, 2.0}, .costs = {20.0, 20.0}});
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[0].cost, 30.0);
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[0].cost_per_second, 15.0);
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[1].cost_per_second, 15.0);
  recorder.add({.items = {2, 2}, .busy_seconds = {1.0, 1.0}});
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[0].cost, 30.0);
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[0].cost_per_second, 0.0);
}

TEST(Metrics, LooksOnlyAtTheLastStepsForRates) {
  MetricsRecorder recorder({"host:0"});
  recorder.add({.items = {1000}, .busy_seconds = {1.0}, .compute_seconds = 1.0});
  for (std::size_t i = 0; i < MetricsRecorder::kWindow; ++i)
    recorder.add({.items = {10}, .busy_seconds = {1.0}, .compute_seconds = 1.0});
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[0].items_per_second, 10.0);
}

TEST(History, KeepsSingleStepsWhileTheyFit) {
  History history(4);
  for (int step = 0; step < 4; ++step)
    history.add({.items = {step, 1}, .busy_seconds = {0.5, 0.25}, .step_seconds = 1.0});
  const std::vector<HistoryRow> rows = history.snapshot();
  ASSERT_EQ(rows.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[i].first_step, static_cast<std::int64_t>(i));
    EXPECT_EQ(rows[i].steps, 1);
    EXPECT_EQ(rows[i].items, (std::vector<std::int64_t>{static_cast<std::int64_t>(i), 1}));
  }
}

TEST(History, HoldsALongRunInFewRowsOfEquallyManyStepsAndLosesNothing) {
  for (const std::size_t capacity : {2u, 3u, 8u}) {
    History history(capacity);
    for (std::int64_t step = 0; step < 1000; ++step) {
      history.add({.items = {step, 1}, .busy_seconds = {0.5, 0.25}, .step_seconds = 2.0, .moved = step % 10 == 0});
      const std::vector<HistoryRow> rows = history.snapshot();
      ASSERT_LE(rows.size(), capacity + capacity % 2);
      HistoryRow sum{.items = {0, 0}, .busy_seconds = {0.0, 0.0}};
      for (std::size_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(rows[i].first_step, sum.steps);
        ASSERT_TRUE(i + 1 == rows.size() ? rows[i].steps <= rows[0].steps : rows[i].steps == rows[0].steps);
        sum.steps += rows[i].steps;
        sum.items[0] += rows[i].items[0];
        sum.items[1] += rows[i].items[1];
        sum.busy_seconds[1] += rows[i].busy_seconds[1];
        sum.step_seconds += rows[i].step_seconds;
        sum.moves += rows[i].moves;
      }
      ASSERT_EQ(sum.steps, step + 1);
      ASSERT_EQ(sum.items[0], step * (step + 1) / 2);
      ASSERT_EQ(sum.items[1], step + 1);
      ASSERT_DOUBLE_EQ(sum.busy_seconds[1], 0.25 * static_cast<double>(step + 1));
      ASSERT_DOUBLE_EQ(sum.step_seconds, 2.0 * static_cast<double>(step + 1));
      ASSERT_EQ(sum.moves, step / 10 + 1);
    }
  }
}

TEST(History, AddsUpCostsWhereAllStepsHadThem) {
  History history(2);
  for (const double cost : {1.0, 2.0, 4.0}) history.add({.items = {1}, .busy_seconds = {1.0}, .costs = {cost}});
  history.add({.items = {1}, .busy_seconds = {1.0}});
  const std::vector<HistoryRow> rows = history.snapshot();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].costs, std::vector<double>{3.0});
  EXPECT_TRUE(rows[1].costs.empty());
}

TEST(History, AddsUpWhatWasLostWhereItIsKnownOfAllSteps) {
  History history(2);
  for (const double seconds : {1.0, 2.0, 4.0}) {
    history.add({.items = {1}, .busy_seconds = {1.0}, .reduction_seconds = seconds, .launching_seconds = 2.0});
  }
  history.add({.items = {1}, .busy_seconds = {1.0}, .launching_seconds = 3.0});
  const std::vector<HistoryRow> rows = history.snapshot();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].reduction_seconds, 3.0);
  EXPECT_EQ(rows[0].launching_seconds, 4.0);
  EXPECT_EQ(rows[1].reduction_seconds, std::nullopt);
  EXPECT_EQ(rows[1].launching_seconds, 5.0);
}

TEST(History, KeepsTheReasonOfTheLastMove) {
  History history(2);
  for (const char* reason : {"first", "second", "", ""}) {
    history.add({.items = {1}, .busy_seconds = {1.0}, .moved = *reason != 0, .reason = reason});
  }
  const std::vector<HistoryRow> rows = history.snapshot();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].reason, "second");
  EXPECT_EQ(rows[1].reason, "");
}

TEST(History, KeepsSpikesThroughMerging) {
  History history(4);
  for (int step = 0; step < 100; ++step)
    history.add({.items = {1}, .busy_seconds = {1.0}, .step_seconds = step == 37 ? 9.0 : 1.0});
  int spikes = 0;
  for (const HistoryRow& row : history.snapshot()) {
    if (row.longest_step_seconds < 9.0) continue;
    ++spikes;
    EXPECT_LE(row.first_step, 37);
    EXPECT_GT(row.first_step + row.steps, 37);
  }
  EXPECT_EQ(spikes, 1);
}

}  // namespace
}  // namespace paceline::observe
