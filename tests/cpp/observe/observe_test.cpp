// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include <paceline/observe/event_ring.hpp>
#include <paceline/observe/metrics.hpp>

namespace paceline::observe {
namespace {

TEST(EventRing, KeepsTheLastEventsInOrder) {
  EventRing ring(4);
  for (std::int64_t step = 0; step < 10; ++step) ring.push({.kind = EventKind::step, .step = step});
  const std::vector<Event> events = ring.snapshot();
  ASSERT_EQ(events.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(events[i].step, static_cast<std::int64_t>(6 + i));
  EXPECT_EQ(ring.pushed(), 10u);
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
  EXPECT_EQ(ring.pushed(), 2000u);
}

TEST(EventRing, NamesEveryKind) {
  EXPECT_STREQ(name_of(EventKind::micro_batch), "micro_batch");
  EXPECT_STREQ(name_of(EventKind::failure), "failure");
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

TEST(Metrics, LooksOnlyAtTheLastStepsForRates) {
  MetricsRecorder recorder({"host:0"});
  recorder.add({.items = {1000}, .busy_seconds = {1.0}, .compute_seconds = 1.0});
  for (std::size_t i = 0; i < MetricsRecorder::kWindow; ++i)
    recorder.add({.items = {10}, .busy_seconds = {1.0}, .compute_seconds = 1.0});
  EXPECT_DOUBLE_EQ(recorder.snapshot().devices[0].items_per_second, 10.0);
}

}  // namespace
}  // namespace paceline::observe
