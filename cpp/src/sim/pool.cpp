// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/pool.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

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

enum class Stream : std::uint64_t { arrival, burst, work, deadline, length, tenant, gang };

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
  std::int64_t stage = 0;  // that waits or runs; those before it have completed
  double since = 0.0;      // when this one could run
  bool over = false;       // its outcome is known

  // As the pool's keys, but for the patience, which all have.
  [[nodiscard]] double key() const { return std::isfinite(deadline) ? deadline : arrival; }
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
      all.push_back({.arrival = now,
                     .deadline = now + options.deadline_seconds * (0.5 + random.uniform()),
                     .length = length,
                     .tenant = tenant_of(options, all.size()),
                     .since = now});
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
    const double alone = truth_.front().seconds(1) * static_cast<double>(largest) / truth_.front().seconds(largest);
    const double gang = static_cast<double>(options.gang) * alone;  // in jobs of a largest batch
    rate_ /= static_cast<double>(options.stages) * (1.0 + options.gang_part * (gang - 1.0));
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
      const double before = std::exchange(now_, std::min({arrival, end, wake_}));
      require(now_ < kNever, "the pool leaves {} requests waiting for ever", pool_.waiting());
      if (!gangs_.empty()) {
        result_.gangs.idle += static_cast<double>(options_.speeds.size() - taken_) * (now_ - before);
        result_.gangs.reserved += static_cast<double>(reserved_) * (now_ - before);
      }
      if (arrival == now_) {
        submit(next++);
      } else if (end == now_) {
        const RunId run = ends_.top().second;
        ends_.pop();
        const Running running = std::move(running_.at(run));
        running_.erase(run);
        taken_ -= running.devices;
        for (const JobId job : running.jobs) completed(job);
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
    std::size_t devices = 0;
    double seconds = 0.0;
  };
  // A job: its request, and which of this.
  struct Part {
    std::size_t request = 0;
    std::int64_t stage = 0;
  };

  // Deterministic, whatever ran before.
  [[nodiscard]] std::uint64_t index_of(Part part) const {
    return part.request * static_cast<std::uint64_t>(options_.stages) + static_cast<std::uint64_t>(part.stage);
  }
  [[nodiscard]] bool is_gang(Part part) const {
    return options_.gang_part > 0.0 && draw(options_, Stream::gang, index_of(part)).uniform() < options_.gang_part;
  }

  void submit(std::size_t number) {
    std::vector<JobId> before;
    waits({number, 0});
    for (std::int64_t stage = 0; stage < options_.stages; ++stage) {
      const Part part{number, stage};
      const Request& request = requests_[number];
      parts_.push_back(part);
      plan::PoolJob job{.deadline_seconds = request.deadline - now_,
                        .cost = request.length,
                        .gang = is_gang(part) ? options_.gang : 1,
                        .tenant = request.tenant};
      if (!before.empty()) job.after = {before.back()};
      JobId id{};
      obey(pool_.submit(now_, job, id));
      if (request.over) break;
      before.push_back(id);
    }
    if (!requests_[number].over) return;
    for (const JobId id : before) {
      bool cancelled = false;
      obey(pool_.cancel(now_, id, cancelled));
    }
  }

  // The job can run from now on.
  void waits(Part part) {
    Request& request = requests_[part.request];
    request.stage = part.stage;
    request.since = now_;
    fairness_.waits(request.tenant, 1);
    if (is_gang(part)) gangs_.emplace(request.key(), index_of(part));
  }

  void completed(JobId job) {
    ++jobs_done_;
    const Part part = part_of(job);
    Request& request = requests_[part.request];
    if (request.over) return;
    if (part.stage + 1 < options_.stages) return waits({part.request, part.stage + 1});
    request.over = true;
    request.latency = now_ - request.arrival;
    (now_ <= request.deadline ? result_.in_time : result_.late) += 1.0;
  }

  void ended(const plan::PoolEnd& end) {
    if (end.outcome == plan::JobOutcome::completed) return;
    const Part part = part_of(end.job);
    Request& request = requests_[part.request];
    if (part.stage == request.stage) {
      fairness_.waits(request.tenant, -1);
      gangs_.erase({request.key(), index_of(part)});
    }
    if (std::exchange(request.over, true)) return;
    (end.outcome == plan::JobOutcome::rejected ? result_.rejected : result_.expired) += 1.0;
  }

  void obey(const PoolDecisions& decisions) {
    wake_ = decisions.wake_seconds;
    for (const plan::PoolEnd& end : decisions.ends) ended(end);
    for (const plan::PoolStart& start : decisions.starts) {
      // By the first job of a batch: the same work in each placement where there are no batches.
      double mean = 0.0;
      for (const std::size_t device : start.devices)
        mean = std::max(mean, truth_[device].fixed_seconds() + truth_[device].per_item_seconds() * start.cost);
      const double seconds = mean * work(options_, index_of(part_of(start.jobs.front())) + 1);
      running_[start.run] = {start.jobs, start.devices.size(), seconds};
      ends_.emplace(now_ + seconds, start.run);
      for (const std::size_t device : start.devices) {
        result_.busy[device] += seconds;
        ++result_.batches[device];
      }
      taken_ += start.devices.size();
      ++runs_;
      started(start.jobs);
    }
    std::set<std::size_t> reserved;
    for (const plan::PoolDecline& decline : decisions.declines)
      if (decline.reason == plan::PoolReason::reserved) reserved.insert(decline.device);
    reserved_ = reserved.size();
  }

  void started(const std::vector<JobId>& jobs) {
    std::vector<std::pair<std::size_t, double>> charges;
    for (const JobId job : jobs) {
      const Part part = part_of(job);
      const Request& request = requests_[part.request];
      const std::pair place{request.key(), index_of(part)};
      const bool gang = gangs_.erase(place) > 0;
      charges.emplace_back(request.tenant, request.length * static_cast<double>(gang ? options_.gang : 1));
      if (!gang) {
        ++alone_;
        if (!gangs_.empty() && *gangs_.begin() < place) result_.gangs.backfilled += 1.0;
      }
      if (part.request < requests_.size() / 10) continue;
      fairness_.waited(request.tenant, now_ - request.since);
      (gang ? gang_waits_ : other_waits_).push_back(now_ - request.since);
    }
    fairness_.starts(charges);
  }

  [[nodiscard]] Part part_of(JobId job) const { return parts_[plan::JobSlots::number(job) - 1]; }

  PoolSimulationResult summary() {
    std::vector<double> latencies;
    const auto skipped = static_cast<std::ptrdiff_t>(requests_.size() / 10);
    for (auto request = requests_.begin() + skipped; request != requests_.end(); ++request) {
      if (request->latency >= 0.0) latencies.push_back(request->latency);
    }
    const SimulatedWaits all = waits_of(std::move(latencies));
    result_.p50_seconds = all.p50_seconds;
    result_.p99_seconds = all.p99_seconds;
    result_.mean_seconds = all.mean_seconds;
    result_.mean_batch = runs_ > 0 ? static_cast<double>(jobs_done_) / static_cast<double>(runs_) : 0.0;
    for (double* part : {&result_.in_time, &result_.late, &result_.rejected, &result_.expired})
      *part /= static_cast<double>(requests_.size());
    result_.elapsed_seconds = now_;
    const double elapsed = std::max(now_, std::numeric_limits<double>::min());
    for (double& busy : result_.busy) busy /= elapsed;
    result_.gangs.waits = waits_of(std::move(gang_waits_));
    result_.gangs.other_waits = waits_of(std::move(other_waits_));
    for (double* idle : {&result_.gangs.idle, &result_.gangs.reserved})
      *idle /= elapsed * static_cast<double>(truth_.size());
    result_.gangs.backfilled /= static_cast<double>(std::max<std::int64_t>(alone_, 1));
    fairness_.tell(result_);
    if (options_.deadline_seconds < kNever || options_.length_variation > 0.0 || options_.gang_part > 0.0 ||
        at_submit(options_.pool.placement))
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
  std::vector<Part> parts_;                           // by the numbers of jobs
  std::set<std::pair<double, std::uint64_t>> gangs_;  // that wait, by their keys
  std::vector<double> gang_waits_, other_waits_;
  std::size_t taken_ = 0;     // devices that run something
  std::size_t reserved_ = 0;  // that leave something waiting for a gang
  std::int64_t runs_ = 0;
  std::int64_t alone_ = 0;  // jobs on one device that have started
  std::int64_t jobs_done_ = 0;
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
  require(options.gang_part >= 0.0 && options.gang_part <= 1.0, "gang_part is {}; it must be from 0 to 1",
          options.gang_part);
  require(options.gang_part == 0.0 || (options.gang >= 2 && options.gang <= std::ssize(options.speeds)),
          "gang is {}; it must be at least 2, and at most the number of devices, {}", options.gang,
          options.speeds.size());
  require(options.stages >= 1, "stages is {}; a request has at least one", options.stages);
  require(options.requests >= 1, "requests is {}; there must be at least one", options.requests);
  return Loop(options).run();
}

}  // namespace paceline::sim
