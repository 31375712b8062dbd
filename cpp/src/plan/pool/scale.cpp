// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/pool_scale.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "refuse.hpp"

namespace paceline::plan {
namespace {

constexpr std::size_t kMostByTrying = 12;  // devices: 4096 sets
constexpr double kRunGain = 0.05;          // of the runs of a second, and of the errors of forecasts
constexpr double kStandardErrors = 3.0;    // by which a trend differs from zero, or it counts as noise
constexpr double kAim = 0.8;               // of the target: minutes differ, and most shall keep it
constexpr std::size_t kMostDesired = 4096;
constexpr double kBacklogSeconds = 60.0;  // in which devices that the box lacks would serve what waits

std::vector<double> speeds_of(std::span<const ScaleDevice> devices, const std::vector<bool>& set) {
  std::vector<double> speeds;
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (set[d]) speeds.push_back(devices[d].speed);
  }
  return speeds;
}

double price_of(std::span<const ScaleDevice> devices, const std::vector<bool>& set) {
  double price = 0.0;
  for (std::size_t d = 0; d < devices.size(); ++d) price += set[d] ? devices[d].price : 0.0;
  return price;
}

}  // namespace

double predicted_wait(std::span<const double> speeds, const ScaleDemand& demand) {
  const double rate = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  if (!(rate > 0.0)) return std::numeric_limits<double>::infinity();
  const double load = demand.work_per_second / rate;
  if (load >= 1.0) return std::numeric_limits<double>::infinity();
  const auto n = static_cast<double>(speeds.size());
  const double busy = std::min(1.0, load * demand.overhead);
  const double service = demand.run_seconds * n / rate;
  const double queue = std::pow(busy, std::sqrt(2.0 * (n + 1.0)) - 1.0) / (n * (1.0 - load)) * service;
  return demand.backlog / rate + demand.variability * queue;
}

double filling_wait(double jobs_per_second, double max_delay_seconds, double largest) {
  const double others = jobs_per_second * max_delay_seconds;  // that come meanwhile
  if (others < largest - 1.0) return max_delay_seconds * (1.0 + others / 2.0) / (1.0 + others);
  return jobs_per_second > 0.0 ? (largest - 1.0) / (2.0 * jobs_per_second) : 0.0;
}

std::vector<bool> least_devices(std::span<const ScaleDevice> devices, const std::vector<bool>& must,
                                const std::vector<bool>& may, const ScaleDemand& demand, double wait_seconds) {
  std::vector<bool> set(devices.size());
  std::vector<std::size_t> open;
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (!devices[d].usable) continue;
    if (must[d]) {
      set[d] = true;
    } else if (may[d]) {
      open.push_back(d);
    }
  }
  std::stable_sort(open.begin(), open.end(), [&](std::size_t a, std::size_t b) {
    return devices[a].price * devices[b].speed < devices[b].price * devices[a].speed;
  });
  const auto enough = [&](const std::vector<bool>& tried) {
    return predicted_wait(speeds_of(devices, tried), demand) <= wait_seconds;
  };
  if (open.size() > kMostByTrying) {
    for (const std::size_t d : open) {
      if (enough(set)) break;
      set[d] = true;
    }
    return set;
  }
  std::vector<bool> best;
  double least = std::numeric_limits<double>::infinity();
  for (std::uint32_t bits = 0; bits < (1U << open.size()); ++bits) {
    std::vector<bool> tried = set;
    for (std::size_t i = 0; i < open.size(); ++i) tried[open[i]] = tried[open[i]] || ((bits >> i) & 1U) != 0;
    const double price = price_of(devices, tried);
    if (price < least && enough(tried)) {
      least = price;
      best = std::move(tried);
    }
  }
  if (!best.empty()) return best;
  for (const std::size_t d : open) set[d] = true;
  return set;
}

std::vector<bool> with_covers(std::vector<bool> wanted, std::span<const ScaleDevice> devices,
                              std::span<const PoolCover> covers) {
  require(wanted.size() == devices.size(), "{} devices were wanted or not, of {}", wanted.size(), devices.size());
  for (const PoolCover& cover : covers) {
    require(cover.devices.size() == devices.size(), "a cover is of {} devices, of {}", cover.devices.size(),
            devices.size());
    std::vector<std::size_t> able;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      if (cover.devices[d]) able.push_back(d);
    }
    const auto rank = [&](std::size_t d) {
      return std::tuple(!wanted[d], !devices[d].usable, !devices[d].active, devices[d].price / devices[d].speed);
    };
    std::ranges::stable_sort(able, {}, rank);
    able.resize(std::min(able.size(), cover.count));
    for (const std::size_t d : able) wanted[d] = true;
  }
  return wanted;
}

Scaler::Scaler(ScaleOptions options) : options_(options) {
  require(std::isfinite(options.wait_seconds) && options.wait_seconds > 0.0, "wait_seconds is {}; it must be positive",
          options.wait_seconds);
  for (const auto& [name, gain] :
       {std::pair{"level_gain", options.level_gain}, std::pair{"trend_gain", options.trend_gain}}) {
    require(gain >= 0.0 && gain <= 1.0, "{} is {}; it must be from 0 to 1", name, gain);
  }
}

void Scaler::learn(const ScaleTick& tick) {
  require(std::isfinite(tick.seconds) && tick.seconds > 0.0, "a tick has {} seconds; they must be positive",
          tick.seconds);
  const double kept = std::pow(1.0 - kRunGain, tick.seconds);
  const double rate = tick.arrived_work / tick.seconds;
  if (!begun_) {
    level_ = rate;
    begun_ = true;
  } else {
    const double before = level_;
    const double error = rate - level_ - trend_ * tick.seconds;
    errors_ = kept * errors_ + error * error * tick.seconds;  // of a second: the longer a tick, the less
    ticks_ = kept * ticks_ + 1.0;
    const double gain = 1.0 - std::pow(1.0 - options_.level_gain, tick.seconds);
    const double trend_gain = 1.0 - std::pow(1.0 - options_.trend_gain, tick.seconds);
    level_ = gain * rate + (1.0 - gain) * (level_ + trend_ * tick.seconds);
    trend_ = trend_gain * (level_ - before) / tick.seconds + (1.0 - trend_gain) * trend_;
  }
  if (!(tick.arrived_jobs > 0.0)) return;
  const bool known = tick.runs > 0.0;
  const double runs = known ? tick.runs : tick.arrived_jobs;
  const double work = known ? tick.run_work : tick.arrived_work;
  const double square = known ? tick.run_square : 2.0 * work * work / runs;
  const auto add = [&](double& sum, double one) { sum = kept * sum + one; };
  add(seen_.arrived_work, tick.arrived_work);
  add(seen_.runs, runs);
  add(seen_.run_work, work);
  add(seen_.run_square, square);
  if (!(seen_.run_work > 0.0) || !(seen_.arrived_work > 0.0)) return;
  const double mean = seen_.run_work / seen_.runs;
  demand_.run_seconds = mean;
  demand_.variability = (1.0 + std::max(0.0, seen_.run_square / seen_.runs / (mean * mean) - 1.0)) / 2.0;
  demand_.overhead = std::max(1.0, seen_.run_work / seen_.arrived_work);
}

double Scaler::trend() const {
  // Var(trend) of Holt's recursion is alpha beta^2 / 2 for white noise, if the gains are small.
  const double variance = options_.level_gain * options_.trend_gain * options_.trend_gain / 2.0 * errors_;
  return trend_ * trend_ * ticks_ > kStandardErrors * kStandardErrors * variance ? trend_ : 0.0;
}

std::vector<bool> Scaler::decide(std::span<const ScaleDevice> devices, const ScaleTick& tick) {
  learn(tick);
  unneeded_.resize(devices.size());
  const std::vector<bool> all(devices.size(), true);
  const std::vector<bool> none(devices.size());
  std::vector<bool> active = none;
  double rate = 0.0;
  double horizon = tick.seconds;  // until a device that is added at the next decision takes work
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (!devices[d].usable) continue;
    active[d] = devices[d].active;
    rate += active[d] ? devices[d].speed : 0.0;
    horizon = std::max(horizon, tick.seconds + devices[d].activation_seconds);
  }
  const double trend = this->trend();
  demand_.work_per_second = std::max(0.0, level_ + trend * horizon);
  const double until_then = std::max(0.0, level_ + trend * horizon / 2.0) - rate;
  demand_.backlog = std::max(0.0, tick.waiting_work + until_then * horizon);
  std::vector<bool> wanted = least_devices(devices, active, all, demand_, kAim * options_.wait_seconds);

  ScaleDemand now = demand_;
  now.backlog = std::max(tick.waiting_work, demand_.backlog);
  const std::vector<bool> needed = least_devices(devices, none, wanted, now, kAim * options_.wait_seconds);
  auto left = std::count(wanted.begin(), wanted.end(), true);
  for (std::size_t d = 0; d < devices.size(); ++d) {
    unneeded_[d] = active[d] && !needed[d] ? unneeded_[d] + tick.seconds : 0.0;
    if (unneeded_[d] == 0.0 || unneeded_[d] < devices[d].keep_seconds || left == 1) continue;
    wanted[d] = false;
    --left;
    unneeded_[d] = 0.0;
  }
  if (left == 0) {  // nothing comes, and nothing was active
    const auto cheapest = std::min_element(devices.begin(), devices.end(), [](const auto& a, const auto& b) {
      return a.usable != b.usable ? a.usable : a.price < b.price;
    });
    if (cheapest != devices.end() && cheapest->usable)
      wanted[static_cast<std::size_t>(cheapest - devices.begin())] = true;
  }
  count(devices, wanted);
  return wanted;
}

void Scaler::count(std::span<const ScaleDevice> devices, const std::vector<bool>& wanted) {
  std::vector<double> speeds = speeds_of(devices, wanted);
  wait_ = predicted_wait(speeds, demand_);
  desired_ = speeds.size();
  std::vector<double> usable;
  for (const ScaleDevice& one : devices) {
    if (one.usable) usable.push_back(one.speed);
  }
  if (usable.empty() || wait_ <= kAim * options_.wait_seconds || speeds.size() < usable.size()) return;
  const double mean = std::accumulate(usable.begin(), usable.end(), 0.0) / static_cast<double>(usable.size());
  ScaleDemand steady = demand_;
  steady.work_per_second += steady.backlog / kBacklogSeconds;
  steady.backlog = 0.0;
  while (predicted_wait(speeds, steady) > kAim * options_.wait_seconds && speeds.size() < kMostDesired) {
    speeds.push_back(mean);
  }
  desired_ = speeds.size();
}

}  // namespace paceline::plan
