// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

namespace paceline::plan::testing {

// A pool whose devices run one job of kind 0 in the given seconds.
struct Box {
  explicit Box(const std::vector<double>& seconds, PoolOptions options = {}, PoolKind kind = {.name = "work"})
      : pool(std::move(options)) {
    (void)pool.add_kind(std::move(kind));
    for (const double one : seconds) {
      const std::size_t d = pool.device_count();
      (void)pool.add_device(0.0, {.name = "d" + std::to_string(d), .device_class = "class " + std::to_string(d)});
      (void)pool.measure(0.0, d, 0, CostModel::affine(0.0, one), 3);
    }
  }
  // Submits and returns the number. What was decided is in `last`.
  JobId submit(double now, PoolJob job = {}) {
    JobId id{};
    last = pool.submit(now, job, id);
    return id;
  }
  const PoolDecisions& finish(double now, const PoolStart& start, RunResult result = RunResult::completed) {
    last = pool.finish(now, start.run, result, start.predicted_seconds > 0.0 ? start.predicted_seconds : 1.0);
    return last;
  }
  PoolState pool;
  PoolDecisions last;
};

// Device 0 is slow, 10 s a job; device 1 takes 1 s, and is released.
struct Released : Box {
  explicit Released(double activation = 5.0, std::vector<double> seconds = {10.0, 1.0}, PoolOptions options = exact(),
                    PoolKind kind = {.name = "work"})
      : Box(seconds, std::move(options), std::move(kind)) {
    for (std::size_t d = 1; d < seconds.size(); ++d) last = pool.retire(0.0, d, true, activation);
  }
  static PoolOptions exact() { return {.margin = 1.0}; }
  bool rejected() const {
    return last.ends.size() == 1 && last.ends[0].outcome == JobOutcome::rejected &&
           last.ends[0].reason == PoolReason::deadline;
  }
  bool expired() const { return last.ends.size() == 1 && last.ends[0].outcome == JobOutcome::expired; }
  std::vector<std::pair<std::vector<bool>, std::size_t>> covers() const {
    std::vector<std::pair<std::vector<bool>, std::size_t>> all;
    for (const PoolCover& cover : pool.covers(0.0)) all.emplace_back(cover.devices, cover.count);
    return all;
  }
  void tick(double now) { last = pool.tick(now); }
};

inline std::vector<std::size_t> devices_of(const PoolDecisions& decisions) {
  std::vector<std::size_t> found;
  for (const PoolStart& start : decisions.starts) found.insert(found.end(), start.devices.begin(), start.devices.end());
  return found;
}

using Devices = std::vector<std::size_t>;
using Jobs = std::vector<JobId>;

}  // namespace paceline::plan::testing
