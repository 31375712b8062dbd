// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/pool.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <unordered_map>

#include <paceline/plan/random.hpp>

#include "plan/pool/job_slots.hpp"
#include "pool_fairness.hpp"
#include "refuse.hpp"

namespace paceline::sim {
namespace {

using plan::CostModel;
using plan::JobId;
using plan::PoolDecisions;
using plan::Random;
using plan::RunId;

enum class Stream : std::uint64_t { arrival, burst, work, deadline, length, tenant };

Random draw(const PoolSimulationOptions& options, Stream stream, std::uint64_t index) {
  return {options.seed, index, static_cast<std::uint64_t>(stream)};
}

double exponential(Random random) { return -std::log(1.0 - random.uniform()); }

// Of mean 1.
double log_normal(Random random, double variation) {
  const double variance = std::log(1.0 + variation * variation);
  return std::exp(random.normal() * std::sqrt(variance) - variance / 2.0);
}

// Of mean 1.
double work(const PoolSimulationOptions& options, std::uint64_t index) {
  Random random = draw(options, Stream::work, index);
  if (options.exponential) return exponential(random);
  if (options.sizes.back() > 1) return std::max(0.5, 1.0 + options.variation * random.normal());
  return log_normal(random, options.variation);
}

struct Request {
  double arrival = 0.0;
  double deadline = std::numeric_limits<double>::infinity();  // of the clock
  double length = 1.0;
  std::size_t tenant = 0;  // from 1, as the pool has it; 0: nobody has a name
  double latency = -1.0;
};

// Whose request this is, by the shares.
std::size_t tenant_of(const PoolSimulationOptions& options, std::uint64_t index) {
  double all = 0.0;
  for (const SimulatedTenant& one : options.tenants) all += one.share;
  double left = draw(options, Stream::tenant, index).uniform() * all;
  for (std::size_t t = 0; t < options.tenants.size(); ++t) {
    left -= options.tenants[t].share;
    if (left < 0.0) return t + 1;
  }
  return options.tenants.size();
}

std::vector<Request> requests_of(const PoolSimulationOptions& options, double rate) {
  std::vector<Request> all;
  double now = 0.0;
  for (std::uint64_t burst = 0; std::ssize(all) < options.requests; ++burst) {
    now += exponential(draw(options, Stream::arrival, burst)) * options.burst / rate;
    Random size = draw(options, Stream::burst, burst);
    do {
      Random random = draw(options, Stream::deadline, all.size());
      const double length = log_normal(draw(options, Stream::length, all.size()), options.length_variation);
      all.push_back(
          {now, now + options.deadline_seconds * (0.5 + random.uniform()), length, tenant_of(options, all.size())});
    } while (size.uniform() > 1.0 / options.burst && std::ssize(all) < options.requests);
  }
  return all;
}

// Requests that are bound to devices at their submit do not wait for the same ones.
bool at_submit(plan::Placement placement) {
  using plan::Placement;
  return placement != Placement::automatic && placement != Placement::any && placement != Placement::custom;
}

class Loop {
 public:
  explicit Loop(const PoolSimulationOptions& options) : options_(options), pool_(options.pool) {
    for (const double speed : options.speeds) {
      truth_.push_back(CostModel::affine(options.fixed_seconds, options.per_item_seconds).scaled(1.0 / speed));
    }
    const std::int64_t largest = options.sizes.back();
    for (const CostModel& model : truth_) rate_ += static_cast<double>(largest) / model.seconds(largest) * options.load;
    (void)pool_.add_kind({.name = "request",
                          .sizes = options.sizes,
                          .max_delay_seconds = options.max_delay_seconds,
                          .padded = options.length_variation > 0.0,
                          .queue_limit = std::numeric_limits<std::int64_t>::max()});
    for (std::size_t d = 0; d < truth_.size(); ++d) {
      const std::string name = "sim:" + std::to_string(d);
      (void)pool_.add_device(0.0, {.name = name, .device_class = name});
      const double believed = options.believed.empty() ? options.speeds[d] : options.believed[d];
      (void)pool_.measure(0.0, d, 0, truth_[d].scaled(options.speeds[d] / believed),
                          std::max<std::int64_t>(options.pool.samples, 1));
    }
    for (std::size_t t = 0; t < options.tenants.size(); ++t)
      (void)pool_.add_tenant({.name = std::to_string(t), .weight = options.tenants[t].weight});
    result_.busy.resize(truth_.size());
    result_.batches.resize(truth_.size());
  }

  PoolSimulationResult run() {
    requests_ = requests_of(options_, rate_);
    std::size_t next = 0;
    while (next < requests_.size() || !ends_.empty() || pool_.waiting() > 0) {
      const double arrival = next < requests_.size() ? requests_[next].arrival : kNever;
      const double end = ends_.empty() ? kNever : ends_.top().first;
      now_ = std::min({arrival, end, wake_});
      require(now_ < kNever, "the pool leaves {} requests waiting for ever", pool_.waiting());
      if (arrival == now_) {
        JobId id{};
        const Request& request = requests_[next];
        fairness_.waits(request.tenant, 1);
        obey(pool_.submit(
            now_, {.deadline_seconds = request.deadline - now_, .cost = request.length, .tenant = request.tenant}, id));
        ++next;
      } else if (end == now_) {
        const RunId run = ends_.top().second;
        ends_.pop();
        const Running running = std::move(running_.at(run));
        running_.erase(run);
        for (const JobId job : running.jobs) {
          Request& request = request_of(job);
          request.latency = now_ - request.arrival;
          (now_ <= request.deadline ? result_.in_time : result_.late) += 1.0;
        }
        obey(pool_.finish(now_, run, plan::RunResult::completed, running.seconds));
      } else {
        obey(pool_.tick(now_));
      }
    }
    return summary();
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Running {
    std::vector<JobId> jobs;
    double seconds = 0.0;
  };

  void obey(const PoolDecisions& decisions) {
    wake_ = decisions.wake_seconds;
    for (const plan::PoolEnd& end : decisions.ends) {
      if (end.outcome != plan::JobOutcome::completed) fairness_.waits(request_of(end.job).tenant, -1);
      if (end.outcome == plan::JobOutcome::rejected) result_.rejected += 1.0;
      if (end.outcome == plan::JobOutcome::expired) result_.expired += 1.0;
    }
    for (const plan::PoolStart& start : decisions.starts) {
      const std::size_t device = start.devices.front();
      // By the first request of a batch: the same work in each placement where there are no batches.
      const double mean = truth_[device].fixed_seconds() + truth_[device].per_item_seconds() * start.cost;
      const double seconds = mean * work(options_, plan::JobSlots::number(start.jobs.front()));
      running_[start.run] = {start.jobs, seconds};
      ends_.emplace(now_ + seconds, start.run);
      result_.busy[device] += seconds;
      ++result_.batches[device];
      std::vector<std::pair<std::size_t, double>> charges;
      for (const JobId job : start.jobs) {
        const Request& request = request_of(job);
        charges.emplace_back(request.tenant, request.length);
        if (plan::JobSlots::number(job) > requests_.size() / 10)
          fairness_.waited(request.tenant, now_ - request.arrival);
      }
      fairness_.starts(charges);
    }
  }

  [[nodiscard]] Request& request_of(JobId job) { return requests_[plan::JobSlots::number(job) - 1]; }

  PoolSimulationResult summary() {
    std::vector<double> latencies;
    const auto skipped = static_cast<std::ptrdiff_t>(requests_.size() / 10);
    for (auto request = requests_.begin() + skipped; request != requests_.end(); ++request) {
      if (request->latency >= 0.0) latencies.push_back(request->latency);
    }
    std::sort(latencies.begin(), latencies.end());
    const double completed = result_.in_time + result_.late;
    if (!latencies.empty()) {
      result_.p50_seconds = latencies[latencies.size() / 2];
      result_.p99_seconds = latencies[latencies.size() * 99 / 100];
      result_.mean_seconds =
          std::accumulate(latencies.begin(), latencies.end(), 0.0) / static_cast<double>(latencies.size());
    }
    const auto batches = std::accumulate(result_.batches.begin(), result_.batches.end(), std::int64_t{0});
    result_.mean_batch = batches > 0 ? completed / static_cast<double>(batches) : 0.0;
    for (double* part : {&result_.in_time, &result_.late, &result_.rejected, &result_.expired})
      *part /= static_cast<double>(requests_.size());
    result_.elapsed_seconds = now_;
    for (double& busy : result_.busy) busy /= std::max(now_, std::numeric_limits<double>::min());
    fairness_.tell(result_);
    if (options_.deadline_seconds < kNever || options_.length_variation > 0.0 || at_submit(options_.pool.placement))
      result_.unfairness = std::numeric_limits<double>::quiet_NaN();
    return std::move(result_);
  }

  const PoolSimulationOptions& options_;
  plan::PoolState pool_;
  std::vector<CostModel> truth_;
  double rate_ = 0.0;  // requests a second
  std::vector<Request> requests_;
  std::priority_queue<std::pair<double, RunId>, std::vector<std::pair<double, RunId>>, std::greater<>> ends_;
  std::unordered_map<RunId, Running> running_;
  double now_ = 0.0;
  double wake_ = kNever;
  Fairness fairness_{options_};
  PoolSimulationResult result_;
};

}  // namespace

PoolSimulationResult simulate_pool(const PoolSimulationOptions& options) {
  const auto positive = [](double value) { return std::isfinite(value) && value > 0.0; };
  require(!options.speeds.empty() && std::all_of(options.speeds.begin(), options.speeds.end(), positive),
          "speeds needs one positive number for each device");
  require(options.believed.empty() || (options.believed.size() == options.speeds.size() &&
                                       std::all_of(options.believed.begin(), options.believed.end(), positive)),
          "believed needs as many positive numbers as there are speeds, {}", options.speeds.size());
  require(!options.sizes.empty() && positive(options.per_item_seconds + options.fixed_seconds),
          "a request must take time, and sizes needs at least 1");
  require(positive(options.load), "load is {}; it must be positive", options.load);
  require(std::isfinite(options.burst) && options.burst >= 1.0, "burst is {}; it must be at least 1", options.burst);
  require(std::isfinite(options.variation) && options.variation >= 0.0, "variation is {}; it cannot be negative",
          options.variation);
  require(std::isfinite(options.length_variation) && options.length_variation >= 0.0,
          "length_variation is {}; it cannot be negative", options.length_variation);
  require(options.deadline_seconds > 0.0, "deadline_seconds is {}; it must be positive", options.deadline_seconds);
  require(std::all_of(options.tenants.begin(), options.tenants.end(),
                      [&](const SimulatedTenant& one) { return positive(one.weight) && positive(one.share); }),
          "each of tenants needs a positive weight and a positive share");
  require(options.requests >= 1, "requests is {}; there must be at least one", options.requests);
  return Loop(options).run();
}

}  // namespace paceline::sim
