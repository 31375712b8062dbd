// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/data_path.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include <paceline/error.hpp>

#include "sim/stream_machine.hpp"

namespace paceline::sim {
namespace {

LinkSpeeds links(double pair, double port, double latency = 0.0) { return {pair, port, 0.0, latency}; }

TEST(StreamMachine, RunsAStreamInOrderAndWaitsForEvents) {
  StreamMachine machine(2, 2, links(1e9, 1e9, 0.5));
  machine.compute(0, 2.0);
  const auto first = machine.record(0);
  machine.wait(1, first);
  machine.copy(1, 0, 1, 1e9);
  const auto second = machine.record(1);
  machine.run();
  EXPECT_NEAR(machine.time_of(first), 2.0, 1e-9);
  EXPECT_NEAR(machine.time_of(second), 3.5, 1e-9);
}

TEST(StreamMachine, CopiesShareAPortFairly) {
  StreamMachine machine(3, 4, links(10.0, 12.0));
  machine.copy(0, 0, 1, 60.0);  // two out of GPU 0, at 6 each
  machine.copy(1, 0, 2, 120.0);
  machine.copy(2, 3, 1, 60.0);  // shares the way into GPU 1, of which 6 are left
  const std::vector<StreamMachine::Event> ends{machine.record(0), machine.record(1), machine.record(2)};
  machine.run();
  EXPECT_NEAR(machine.time_of(ends[0]), 10.0, 1e-6);
  EXPECT_NEAR(machine.time_of(ends[2]), 10.0, 1e-6);
  EXPECT_NEAR(machine.time_of(ends[1]), 16.0, 1e-6) << "the rest at 10, which is the pair's";
}

/// One bucket, so that nothing overlaps, and no time for launches and memory.
DataPathOptions plain(std::size_t gpus) {
  return {.gpus = gpus,
          .parameters = 1e9,
          .bytes_each = 1.0,
          .forward_seconds = 1.0,
          .backward_seconds = 2.0,
          .update_seconds = 0.5,
          .bucket_bytes = 2e9,
          .pieces = 1,
          .memory_bytes_per_second = 1e30,
          .launch_seconds = 0.0,
          .links = links(1e9, 1e9)};
}

double exposed(const DataPathOptions& options, std::size_t way) {
  return simulate_data_path(options)[way].exposed_seconds;
}

TEST(DataPath, WithoutOverlapIsWhatTheFormulasSay) {
  for (const std::size_t n : {2U, 3U, 4U, 8U}) {
    const auto count = static_cast<double>(n);
    const DataPathOptions options = plain(n);
    // All gradients into home, and all parameters out of it.
    EXPECT_NEAR(exposed(options, 0), 2.0 * (count - 1.0), 1e-6) << n;
    // The bucket into each of the others, which sum it, then into home; with two GPUs into home only. And all
    // parameters along the chain, one GPU after the other.
    const double buckets = (n > 2 ? 2.0 : 1.0) + (count - 1.0);
    EXPECT_NEAR(exposed(options, 1), buckets, 1e-6) << n;
    // Twice (n-1)/n out of home, a quarter of (n-1)/n into it after the last round, and only a part of the update.
    EXPECT_NEAR(exposed(options, 2), buckets + (2.0 + 0.25 - 0.5) * (count - 1.0) / count, 1e-6) << n;
    // The same into each GPU for gradients and for parameters, and only a part of the update.
    EXPECT_NEAR(exposed(options, 3), 2.0 * (count - 1.0) / count - 0.5 * (count - 1.0) / count, 1e-6) << n;
    EXPECT_NEAR(exposed(options, 4), 2.0 * (count - 1.0) / count, 1e-6) << n;
  }
}

TEST(DataPath, AddsTheLatencyOfEachCopy) {
  DataPathOptions options = plain(4);
  const double before = exposed(options, 4);
  options.links.latency_seconds = 0.01;
  EXPECT_NEAR(exposed(options, 4) - before, 6 * 0.01, 1e-6) << "two rounds of three";
}

TEST(DataPath, HidesAllButTheLastBucketOfAFastLink) {
  DataPathOptions options = plain(4);
  options.bucket_bytes = 1e7;  // 100 buckets
  options.links = links(20e9, 20e9);
  EXPECT_NEAR(exposed(options, 4), 2.0 * 0.75 * 1e7 / 20e9, 1e-6);
  EXPECT_LT(exposed(options, 3), 0.0) << "the update is shared";
  EXPECT_LT(exposed(options, 1), 0.25);
  EXPECT_NEAR(exposed(options, 0), 2.0 * 3.0 / 20.0, 1e-6) << "nothing of it overlaps";
}

TEST(DataPath, IsNeverSlowerOnAFasterLink) {
  for (std::size_t way = 0; way < 5; ++way) {
    double before = 1e30;
    for (const double bandwidth : {1e9, 3e9, 10e9, 30e9, 100e9}) {
      DataPathOptions options = plain(8);
      options.bucket_bytes = 5e7;
      options.links = links(bandwidth, bandwidth);
      const double now = exposed(options, way);
      EXPECT_LE(now, before * (1.0 + 1e-9)) << way;
      before = now;
    }
  }
}

TEST(DataPath, TakesAtLeastAsLongAsTheThreadsNeedToStartItsOperators) {
  DataPathOptions options = plain(8);
  options.links = links(1e12, 1e12);
  const std::vector<DataPathOutcome> before = simulate_data_path(options);
  options.operators = 3.5 * launch_rate(1);  // a thread alone is as fast as the GPU, eight together are not
  const std::vector<DataPathOutcome> after = simulate_data_path(options);
  for (std::size_t way = 0; way < 4; ++way) {
    EXPECT_NEAR(after[way].step_seconds, 8.0 * options.operators / launch_rate(8), 1e-9) << way;
  }
  EXPECT_NEAR(after[4].step_seconds, before[4].step_seconds, 1e-9) << "a process for each GPU";
  EXPECT_EQ(launch_rate(16), launch_rate(8));
  EXPECT_GT(launch_rate(3), launch_rate(2));
  EXPECT_LT(launch_rate(3), launch_rate(4));
  EXPECT_THROW(static_cast<void>(launch_rate(0)), InvalidArgument);
}

TEST(DataPath, RefusesWhatCannotBe) {
  DataPathOptions options = plain(1);
  EXPECT_THROW(static_cast<void>(simulate_data_path(options)), InvalidArgument);
  options = plain(2);
  options.forward_seconds = std::nan("");
  EXPECT_THROW(static_cast<void>(simulate_data_path(options)), InvalidArgument);
  options = plain(2);
  options.bucket_bytes = 1.0;
  EXPECT_THROW(static_cast<void>(simulate_data_path(options)), InvalidArgument);
  options = plain(2);
  options.operators = -1.0;
  EXPECT_THROW(static_cast<void>(simulate_data_path(options)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(link_speeds("token ring")), InvalidArgument);
}

}  // namespace
}  // namespace paceline::sim
