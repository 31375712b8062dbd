// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/day.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>
#include <paceline/plan/random.hpp>

#include "day_hindsight.hpp"
#include "plan/pool/job_slots.hpp"
#include "refuse.hpp"

namespace paceline::sim {
namespace {

using plan::JobId;
using plan::Random;
using plan::RunId;

constexpr double kTick = 1.0;    // seconds between two decisions
constexpr double kPause = 0.02;  // between two that deadlines want, as in a Pool
constexpr double kMostJobs = 3e7;

enum class DayStream : std::uint64_t { arrival, thin, work, burst, deadline };

Random day_draw(const DayOptions& options, DayStream stream, std::uint64_t index) {
  return {options.seed, index, static_cast<std::uint64_t>(stream)};
}

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
    const double deadline = 0.5 + day_draw(options, DayStream::deadline, jobs.size()).uniform();
    jobs.push_back({now, options.job_seconds * std::exp(normal * std::sqrt(variance) - variance / 2.0),
                    options.deadline_seconds * deadline});
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
    std::size_t next = 0;
    while (next < jobs_.size() || !ends_.empty() || pool_.waiting() > 0) {
      const double arrival = next < jobs_.size() ? jobs_[next].arrival : kEndless;
      const double end = ends_.empty() ? kEndless : ends_.top().first;
      const auto ready = std::ranges::min_element(ready_);
      now_ = std::min({arrival, end, look_, *ready, wake_});
      if (now_ == look_) {
        look(next);
      } else if (now_ == *ready) {
        restore(static_cast<std::size_t>(ready - ready_.begin()));
      } else if (now_ == arrival) {
        JobId id{};
        waiting_ += options_.job_seconds;
        obey(pool_.submit(now_, {.deadline_seconds = jobs_[next++].deadline}, id));
      } else if (now_ == end) {
        const RunId run = ends_.top().second;
        ends_.pop();
        const Running ended = running_.at(run);
        running_.erase(run);
        (now_ <= ended.job->arrival + ended.job->deadline ? result_.in_time : result_.late) += 1.0;
        obey(pool_.finish(now_, run, plan::RunResult::completed, ended.seconds));
      } else {
        obey(pool_.tick(now_));
      }
    }
    double sum = 0.0;
    const double started = std::accumulate(counts_.begin(), counts_.end(), 0.0);
    for (std::size_t m = 0; m < waits_.size(); ++m) {
      sum += waits_[m];
      if (waits_[m] <= options_.scale.wait_seconds * counts_[m]) ++result_.met;
    }
    result_.minutes = std::ssize(waits_);
    result_.mean_wait_seconds = started > 0.0 ? sum / started : 0.0;
    for (double* part : {&result_.in_time, &result_.late, &result_.rejected, &result_.expired})
      *part /= std::max(static_cast<double>(jobs_.size()), 1.0);
    return result_;
  }

 private:
  struct Running {
    const DayJob* job = nullptr;
    double seconds = 0.0;
  };

  void look(std::size_t next) {
    const double seconds = now_ - std::exchange(looked_, now_);
    look_ = now_ + kTick;
    if (all_) return;
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      if (devices_[d].active) result_.device_hours += seconds / 3600.0;
    }
    const auto came = static_cast<double>(next - seen_);
    const plan::PoolLoad load = pool_.loads().front();
    const double run = load.run_work * options_.job_seconds;
    const double square = load.run_square * options_.job_seconds * options_.job_seconds;
    const double runs = load.run_jobs > 0.0 ? came : 0.0;
    std::vector<bool> wanted = scaler_.decide(
        devices_, {seconds, came * options_.job_seconds, came, waiting_, runs, runs * run, runs * square});
    wanted = plan::with_covers(std::move(wanted), devices_, pool_.covers(now_));
    seen_ = next;
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      if (wanted[d] && !devices_[d].active) {
        ++result_.activations;
        ready_[d] = now_ + options_.activation_seconds;
      }
      if (!wanted[d] && devices_[d].active) {
        ready_[d] = kEndless;
        obey(pool_.retire(now_, d, true, timed_ ? options_.activation_seconds : kEndless));
      }
      devices_[d].active = wanted[d];
      if (ready_[d] <= now_) restore(d);
    }
  }

  void restore(std::size_t device) {
    ready_[device] = kEndless;
    obey(pool_.restore(now_, device));
  }

  void obey(const plan::PoolDecisions& decisions) {
    wake_ = decisions.wake_seconds;
    if (decisions.wants_devices && !all_) look_ = std::min(look_, std::max(now_, looked_ + kPause));
    for (const plan::PoolEnd& end : decisions.ends) {
      if (end.outcome == plan::JobOutcome::completed) continue;
      waiting_ -= options_.job_seconds;
      (end.outcome == plan::JobOutcome::rejected ? result_.rejected : result_.expired) += 1.0;
    }
    for (const plan::PoolStart& start : decisions.starts) {
      const DayJob& job = jobs_[plan::JobSlots::number(start.jobs.front()) - 1];
      const auto minute = std::min(static_cast<std::size_t>(job.arrival / kMinute), waits_.size() - 1);
      waits_[minute] += now_ - job.arrival;
      counts_[minute] += 1.0;
      waiting_ -= options_.job_seconds;
      const double seconds = job.work / options_.speeds[start.devices.front()];
      running_[start.run] = {&job, seconds};
      ends_.emplace(now_ + seconds, start.run);
    }
  }

  const DayOptions& options_;
  const std::vector<DayJob>& jobs_;
  const bool all_;
  const bool timed_ = options_.deadline_seconds < kEndless;
  plan::PoolState pool_;
  plan::Scaler scaler_;
  std::vector<plan::ScaleDevice> devices_;
  std::vector<double> ready_;  // when a device that is activated takes work
  std::priority_queue<std::pair<double, RunId>, std::vector<std::pair<double, RunId>>, std::greater<>> ends_;
  std::unordered_map<RunId, Running> running_;
  std::vector<double> waits_, counts_;  // by the minute of the arrival
  double now_ = 0.0;
  double wake_ = kEndless;
  double look_ = kTick;  // when it decides which devices it wants
  double looked_ = 0.0;
  double waiting_ = 0.0;  // work, as far as the pool can know it: each job counts as the mean
  std::size_t seen_ = 0;
  DayResult result_;
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
  require(options.deadline_seconds > 0.0, "deadline_seconds is {}; it must be positive", options.deadline_seconds);
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
  const DayResult all = Day(options, jobs, true).run();
  result.all_met = all.met;
  result.all_in_time = all.in_time;
  result.best_device_hours = hindsight.hours();
  result.all_device_hours = static_cast<double>(options.speeds.size()) * options.hours;
  return result;
}

}  // namespace paceline::sim
