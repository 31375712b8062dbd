// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/day.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <string>
#include <unordered_map>

#include <paceline/plan/pool.hpp>
#include <paceline/plan/random.hpp>

#include "plan/pool/job_slots.hpp"
#include "refuse.hpp"

namespace paceline::sim {
namespace {

using plan::JobId;
using plan::Random;
using plan::RunId;

constexpr double kEndless = std::numeric_limits<double>::infinity();
constexpr double kMinute = 60.0;
constexpr double kTick = 1.0;
constexpr double kMostJobs = 3e7;
constexpr std::size_t kMostStates = 512;

enum class DayStream : std::uint64_t { arrival, thin, work, burst };

Random day_draw(const DayOptions& options, DayStream stream, std::uint64_t index) {
  return {options.seed, index, static_cast<std::uint64_t>(stream)};
}

struct DayJob {
  double arrival = 0.0;
  double work = 0.0;  // seconds at speed 1
};

/// Jobs a second over the day.
class Rate {
 public:
  explicit Rate(const DayOptions& options) : options_(options) {
    const double speed = std::accumulate(options.speeds.begin(), options.speeds.end(), 0.0);
    full_ = speed / options.job_seconds;
    Random random = day_draw(options, DayStream::burst, 0);
    for (std::int64_t b = 0; b < options.bursts; ++b) bursts_.push_back(random.uniform() * options.hours * 3600.0);
  }

  [[nodiscard]] double at(double now) const {
    const double hours = 24.0 * now / (options_.hours * 3600.0);
    const double day = (1.0 - std::cos(2.0 * M_PI * hours / 24.0)) / 2.0;
    double burst = 0.0;  // of those that overlap, the strongest
    for (const double begin : bursts_) {
      const double since = now - begin;
      const double left = options_.burst_seconds + 2.0 * options_.ramp_seconds - since;
      burst = std::max(burst, std::clamp(std::min(since, left) / options_.ramp_seconds, 0.0, 1.0));
    }
    return full_ * (options_.low + (options_.high - options_.low) * day + options_.burst * burst);
  }
  [[nodiscard]] double most() const { return full_ * (options_.high + options_.burst); }

 private:
  const DayOptions& options_;
  double full_ = 0.0;
  std::vector<double> bursts_;
};

std::vector<DayJob> jobs_of(const DayOptions& options) {
  const Rate rate(options);
  const double end = options.hours * 3600.0;
  const double variance = std::log(1.0 + options.variation * options.variation);
  std::vector<DayJob> jobs;
  double now = 0.0;
  for (std::uint64_t n = 0;; ++n) {
    now -= std::log(1.0 - day_draw(options, DayStream::arrival, n).uniform()) / rate.most();
    if (now >= end) return jobs;
    if (day_draw(options, DayStream::thin, n).uniform() * rate.most() > rate.at(now)) continue;
    const double normal = day_draw(options, DayStream::work, jobs.size()).normal();
    jobs.push_back({now, options.job_seconds * std::exp(normal * std::sqrt(variance) - variance / 2.0)});
  }
}

/// The pool with its scaler, or with `all` devices active all day.
class Day {
 public:
  Day(const DayOptions& options, const std::vector<DayJob>& jobs, bool all)
      : options_(options), jobs_(jobs), all_(all), scaler_(options.scale) {
    (void)pool_.add_kind({.name = "request", .queue_limit = std::numeric_limits<std::int64_t>::max()});
    for (std::size_t d = 0; d < options.speeds.size(); ++d) {
      const std::string name = "sim:" + std::to_string(d);
      (void)pool_.add_device(0.0, {.name = name, .device_class = name});
      (void)pool_.measure(0.0, d, 0, plan::CostModel::affine(0.0, options.job_seconds / options.speeds[d]), 3);
      const double seconds = options.activation_seconds;
      devices_.push_back({.speed = options.speeds[d], .activation_seconds = seconds, .keep_seconds = seconds});
    }
    ready_.assign(devices_.size(), kEndless);
    waits_.resize(static_cast<std::size_t>(std::ceil(options.hours * 60.0)));
    counts_.resize(waits_.size());
  }

  DayResult run() {
    double tick = kTick;
    std::size_t next = 0;
    while (next < jobs_.size() || !ends_.empty()) {
      const double arrival = next < jobs_.size() ? jobs_[next].arrival : kEndless;
      const double end = ends_.empty() ? kEndless : ends_.top().first;
      now_ = std::min({arrival, end, tick, wake_});
      if (now_ == tick) {
        if (!all_) decide(next);
        tick += kTick;
      } else if (now_ == arrival) {
        JobId id{};
        waiting_ += options_.job_seconds;
        ++next;
        obey(pool_.submit(now_, {}, id));
      } else if (now_ == end) {
        const RunId run = ends_.top().second;
        ends_.pop();
        const double seconds = running_.at(run);
        running_.erase(run);
        obey(pool_.finish(now_, run, plan::RunResult::completed, seconds));
      } else {
        obey(pool_.tick(now_));
      }
    }
    double sum = 0.0;
    for (std::size_t m = 0; m < waits_.size(); ++m) {
      sum += waits_[m];
      if (waits_[m] <= options_.scale.wait_seconds * counts_[m]) ++result_.met;
    }
    result_.minutes = std::ssize(waits_);
    result_.mean_wait_seconds = jobs_.empty() ? 0.0 : sum / static_cast<double>(jobs_.size());
    return result_;
  }

 private:
  void decide(std::size_t next) {
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      if (devices_[d].active) result_.device_hours += kTick / 3600.0;
    }
    const auto came = static_cast<double>(next - seen_);
    const plan::PoolLoad load = pool_.loads().front();
    const double run = load.run_work * options_.job_seconds;
    const double square = load.run_square * options_.job_seconds * options_.job_seconds;
    const double runs = load.run_jobs > 0.0 ? came : 0.0;
    const std::vector<bool> wanted =
        scaler_.decide(devices_, {kTick, came * options_.job_seconds, came, waiting_, runs, runs * run, runs * square});
    seen_ = next;
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      if (wanted[d] && !devices_[d].active) {
        ++result_.activations;
        ready_[d] = now_ + options_.activation_seconds;
      }
      if (!wanted[d] && devices_[d].active) {
        ready_[d] = kEndless;
        obey(pool_.retire(now_, d));
      }
      devices_[d].active = wanted[d];
      if (ready_[d] <= now_) {
        ready_[d] = kEndless;
        obey(pool_.restore(now_, d));
      }
    }
  }

  void obey(const plan::PoolDecisions& decisions) {
    wake_ = decisions.wake_seconds;
    for (const plan::PoolStart& start : decisions.starts) {
      const std::size_t job = plan::JobSlots::number(start.jobs.front()) - 1;
      const auto minute = std::min(static_cast<std::size_t>(jobs_[job].arrival / kMinute), waits_.size() - 1);
      waits_[minute] += now_ - jobs_[job].arrival;
      counts_[minute] += 1.0;
      waiting_ -= options_.job_seconds;
      const double seconds = jobs_[job].work / options_.speeds[start.devices.front()];
      running_[start.run] = seconds;
      ends_.emplace(now_ + seconds, start.run);
    }
  }

  const DayOptions& options_;
  const std::vector<DayJob>& jobs_;
  const bool all_;
  plan::PoolState pool_;
  plan::Scaler scaler_;
  std::vector<plan::ScaleDevice> devices_;
  std::vector<double> ready_;  // when a device that is activated takes work
  std::priority_queue<std::pair<double, RunId>, std::vector<std::pair<double, RunId>>, std::greater<>> ends_;
  std::unordered_map<RunId, double> running_;
  std::vector<double> waits_, counts_;  // by the minute of the arrival
  double now_ = 0.0;
  double wake_ = kEndless;
  double waiting_ = 0.0;  // work, as far as the pool can know it: each job counts as the mean
  std::size_t seen_ = 0;
  DayResult result_;
};

/// The device-hours of the best plan that knows all jobs. A state is how many devices of each speed are active.
class Hindsight {
 public:
  Hindsight(const DayOptions& options, const std::vector<DayJob>& jobs) : options_(options), jobs_(jobs) {
    std::map<double, int, std::greater<>> classes;
    for (const double speed : options.speeds) ++classes[speed];
    states_.emplace_back();
    for (const auto& [speed, count] : classes) {
      speeds_.push_back(speed);
      std::vector<std::vector<int>> longer;
      for (const std::vector<int>& state : states_) {
        for (int n = 0; n <= count; ++n) {
          longer.push_back(state);
          longer.back().push_back(n);
        }
      }
      states_ = std::move(longer);
    }
    require(states_.size() <= kMostStates,
            "these speeds can be active in {} ways, at most {} are compared: use fewer "
            "different speeds",
            states_.size(), kMostStates);
    for (std::size_t s = 0; s < states_.size(); ++s) number_[states_[s]] = s;
  }

  double hours() {
    const std::size_t all = states_.size();
    std::vector<double> least(all, 0.0);  // device-seconds up to a minute that ends in this state
    std::size_t first = 0;
    const auto minutes = static_cast<std::size_t>(std::ceil(options_.hours * 60.0));
    for (std::size_t m = 0; m < minutes; ++m) {
      std::size_t last = first;
      while (last < jobs_.size() && jobs_[last].arrival < kMinute * static_cast<double>(m + 1)) ++last;
      const std::vector<bool> enough = feasible(first, last, kMinute * static_cast<double>(m));
      std::vector<double> next(all, kEndless);
      for (std::size_t to = 0; to < all; ++to) {
        if (!enough[to]) continue;
        for (std::size_t from = 0; from < all; ++from) {
          if (least[from] == kEndless) continue;
          const double activations = m == 0 ? 0.0 : options_.activation_seconds * added(from, to);
          next[to] = std::min(next[to], least[from] + activations + kMinute * count(to));
        }
      }
      least = std::move(next);
      first = last;
    }
    return *std::min_element(least.begin(), least.end()) / 3600.0;
  }

 private:
  [[nodiscard]] double count(std::size_t state) const {
    return std::accumulate(states_[state].begin(), states_[state].end(), 0);
  }
  [[nodiscard]] double added(std::size_t from, std::size_t to) const {
    double devices = 0.0;
    for (std::size_t c = 0; c < speeds_.size(); ++c) devices += std::max(0, states_[to][c] - states_[from][c]);
    return devices;
  }

  // Which states meet the target in the minute; all devices always count as if they did. Fewer devices than some that
  // do not are not tried.
  std::vector<bool> feasible(std::size_t first, std::size_t last, double begin) {
    std::vector<bool> enough(states_.size());
    enough.back() = true;
    for (std::size_t s = states_.size() - 1; s-- > 0;) {
      std::vector<int> larger = states_[s];
      bool may = true;
      for (std::size_t c = 0; c < larger.size() && may; ++c) {
        ++larger[c];
        const auto found = number_.find(larger);
        may = found == number_.end() || enough[found->second];
        --larger[c];
      }
      enough[s] = may && meets(states_[s], first, last, begin);
    }
    return enough;
  }

  // First come, first served, on the fastest device that is free, or else on the one that is free first.
  bool meets(const std::vector<int>& state, std::size_t first, std::size_t last, double begin) {
    free_.clear();
    for (std::size_t c = 0; c < speeds_.size(); ++c) {
      for (int n = 0; n < state[c]; ++n) free_.emplace_back(begin, speeds_[c]);
    }
    if (free_.empty()) return first == last;
    double left = options_.scale.wait_seconds * static_cast<double>(last - first);
    for (std::size_t j = first; j < last; ++j) {
      const double arrival = jobs_[j].arrival;
      std::size_t best = 0;
      for (std::size_t d = 0; d < free_.size(); ++d) {
        if (free_[d].first <= arrival) {
          best = d;
          break;
        }
        if (free_[d].first < free_[best].first) best = d;
      }
      const double start = std::max(arrival, free_[best].first);
      left -= start - arrival;
      if (left < 0.0) return false;
      free_[best].first = start + jobs_[j].work / free_[best].second;
    }
    return true;
  }

  const DayOptions& options_;
  const std::vector<DayJob>& jobs_;
  std::vector<double> speeds_;            // of the classes, the fastest first
  std::vector<std::vector<int>> states_;  // the last one has all devices
  std::map<std::vector<int>, std::size_t> number_;
  std::vector<std::pair<double, double>> free_;  // when each device is free, and its speed
};

}  // namespace

DayResult simulate_day(const DayOptions& options) {
  const auto positive = [](double value) { return std::isfinite(value) && value > 0.0; };
  const auto not_negative = [](double value) { return std::isfinite(value) && value >= 0.0; };
  require(!options.speeds.empty() && std::all_of(options.speeds.begin(), options.speeds.end(), positive),
          "speeds needs one positive number for each device");
  require(positive(options.job_seconds), "job_seconds is {}; it must be positive", options.job_seconds);
  require(positive(options.hours) && options.hours <= 240.0, "hours is {}; it must be in (0, 240]", options.hours);
  require(positive(options.ramp_seconds), "ramp_seconds is {}; it must be positive", options.ramp_seconds);
  require(options.bursts >= 0, "bursts is {}; it cannot be negative", options.bursts);
  for (const auto& [name, value] :
       {std::pair{"activation_seconds", options.activation_seconds}, std::pair{"variation", options.variation},
        std::pair{"low", options.low}, std::pair{"burst", options.burst},
        std::pair{"burst_seconds", options.burst_seconds}}) {
    require(not_negative(value), "{} is {}; it cannot be negative", name, value);
  }
  require(positive(options.high) && options.high >= options.low,
          "high is {}; it must be at least low, {}, and positive", options.high, options.low);
  const double expected = Rate(options).most() * options.hours * 3600.0;
  require(expected <= kMostJobs, "a day of {:.3g} jobs is too long to simulate, at most {:.3g}: take longer jobs",
          expected, kMostJobs);
  const std::vector<DayJob> jobs = jobs_of(options);
  Hindsight hindsight(options, jobs);  // first: it may refuse the speeds
  DayResult result = Day(options, jobs, false).run();
  result.all_met = Day(options, jobs, true).run().met;
  result.best_device_hours = hindsight.hours();
  result.all_device_hours = static_cast<double>(options.speeds.size()) * options.hours;
  return result;
}

}  // namespace paceline::sim
