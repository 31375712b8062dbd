// SPDX-License-Identifier: Apache-2.0
//
// What comes to a pool, for how many devices it needs.
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/plan/pool_scale.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

// Work is counted in seconds that all devices together take for it. So kinds that devices are good at differently add
// up.
std::optional<PoolTick> PoolCore::scale_tick(double least_seconds, double keep_seconds) {
  check_process("scale_tick");
  const std::lock_guard lock(mutex_);
  const double time = now();
  if (time <= ticked_ || (time - ticked_ < least_seconds && !wants_devices_)) return std::nullopt;
  wants_devices_ = false;
  PoolTick tick{.seconds = time - ticked_, .known = submitters_ == 0, .speeds = std::vector<double>(devices_.size())};
  ticked_ = time;
  const std::vector<plan::PoolLoad> loads = state_.loads();
  arrived_.resize(loads.size());
  double known = 0.0;
  for (std::size_t kind = 0; kind < loads.size(); ++kind) {
    const plan::PoolLoad& load = loads[kind];
    const double before = std::exchange(arrived_[kind], load.arrived);
    const double jobs = load.arrived < before ? load.arrived : load.arrived - before;  // less: the number is another's
    const double all = std::accumulate(load.rates.begin(), load.rates.end(), 0.0);
    if (!(all > 0.0)) {
      tick.known = tick.known && load.waiting <= 0.0;
      continue;
    }
    tick.arrived_jobs += jobs;
    tick.arrived_work += jobs / all;
    if (load.run_jobs > 0.0) {
      const double runs = jobs / load.run_jobs;
      tick.runs += runs;
      tick.run_work += runs * load.run_work / all;
      tick.run_square += runs * load.run_square / (all * all);
    } else {  // each job as a run of exponential work
      tick.runs += jobs;
      tick.run_work += jobs / all;
      tick.run_square += 2.0 * jobs / (all * all);
    }
    const plan::PoolKind& spec = state_.kind(kind);
    if (spec.max_delay_seconds > 0.0 && jobs > 0.0) {
      const auto largest = static_cast<double>(spec.sizes.back());
      tick.filling += jobs * plan::filling_wait(jobs / tick.seconds, spec.max_delay_seconds, largest);
    }
    tick.waiting_work += load.waiting / all;
    const double weight = (jobs + load.waiting) / all;
    known += weight;
    for (std::size_t d = 0; d < devices_.size(); ++d) tick.speeds[d] += weight * load.rates[d] / all;
  }
  if (tick.arrived_jobs > 0.0) tick.filling /= tick.arrived_jobs;
  if (known > 0.0) {
    for (double& speed : tick.speeds) speed /= known;
    speeds_ = tick.speeds;
  } else {
    speeds_.resize(devices_.size(), 1.0 / static_cast<double>(devices_.size()));
    tick.speeds = speeds_;
  }
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    tick.lost.push_back(state_.lost(d));
    if (tick.lost.back()) tick.speeds[d] = 0.0;
  }
  for (plan::PoolCover& cover : state_.covers(time - keep_seconds)) {
    tick.covers.emplace_back(std::move(cover.devices), cover.count);
  }
  return tick;
}

void PoolCore::on_wants_devices(std::function<void()> call, double wait_seconds) {
  const std::lock_guard lock(mutex_);
  state_.want_above(wait_seconds);
  on_wants_devices_.swap(call);  // what was there is destroyed without the lock
}

}  // namespace paceline::internal
