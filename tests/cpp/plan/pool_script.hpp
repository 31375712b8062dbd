// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/plan/pool.hpp>

#include "draws.hpp"
#include "pool_watcher.hpp"

namespace paceline::plan::testing {

/// Changes decisions on their way to the watcher, once. Returns whether it did.
using Fault = std::function<bool(const PoolState&, const PoolWatcher&, PoolDecisions&)>;

/// Random events, and what a watcher sees of them.
class Script {
 public:
  Script(std::uint64_t seed, Fault fault) : draws_(seed), fault_(std::move(fault)), pool_(options()) {
    const std::size_t devices = draws_.count(1, 4);
    for (std::size_t d = 0; d < devices; ++d) {
      PoolDevice device{.name = "d" + std::to_string(d), .device_class = draws_.chance(0.5) ? "a" : "b"};
      if (draws_.chance(0.5)) device.labels.push_back("special");
      if (draws_.chance(0.5)) device.memory_bytes = static_cast<double>(draws_.integer(4, 12));
      if (d > 0 && draws_.chance(0.2)) device.shares_memory_of = draws_.count(0, d - 1);
      (void)pool_.add_device(0.0, device);
    }
    needs_ = {{}, {.labels = {"special"}}, {.accepts = [](const PoolDevice& one) { return one.device_class == "a"; }}};
    (void)pool_.add_need(needs_[1]);
    (void)pool_.add_need(needs_[2]);
    for (tenants_ = draws_.chance(0.5) ? 1 : draws_.count(2, 4); pool_.tenants().size() < tenants_;) {
      PoolTenant tenant{.name = "t", .weight = draws_.real(0.5, 3.0)};
      if (draws_.chance(0.5)) tenant.devices = draws_.integer(1, 2);
      if (draws_.chance(0.3)) tenant.memory_bytes = static_cast<double>(draws_.integer(1, 8));
      (void)pool_.add_tenant(tenant);
    }
    for (std::size_t k = draws_.count(1, 3); k > 0; --k) {
      PoolKind kind{.name = "k" + std::to_string(k), .idempotent = draws_.chance(0.5)};
      if (draws_.chance(0.5)) kind.sizes = {1, 2, 4, 8};
      if (draws_.chance(0.2)) kind.max_delay_seconds = 0.5;
      kind.padded = draws_.chance(0.3);
      if (draws_.chance(0.5)) kind.peak_bytes_per_item = 0.5 * static_cast<double>(draws_.integer(0, 2));
      if (draws_.chance(0.5)) {
        kind.model = kind.name;
        kind.resident_bytes = static_cast<double>(draws_.integer(1, 5));
        kind.reload_seconds = draws_.real(0.0, 1.0);
      }
      kinds_ = pool_.add_kind(kind) + 1;
      if (!draws_.chance(0.7)) continue;  // the others are unknown
      for (std::size_t d = 0; d < devices; ++d) (void)pool_.measure(0.0, d, kinds_ - 1, model(), 3);
    }
  }

  // The problem that the watcher saw, or "".
  std::string run(int events) {
    PoolWatcher watcher(pool_, needs_);
    watcher_ = &watcher;
    for (int i = 0; i < events && watcher.problem.empty(); ++i) event();
    for (std::size_t d = 0; d < pool_.device_count(); ++d) {
      watcher.lost.erase(d);
      if (!pool_.active(d)) tell(pool_.restore(now_, d));
    }
    for (int i = 0; !watcher.jobs.empty() && watcher.problem.empty(); ++i) {
      if (i > 100000) return "the script does not come to an end";
      if (!watcher.runs.empty()) {
        finish(RunResult::completed);
      } else if (wake_ < std::numeric_limits<double>::infinity()) {
        now_ = std::max(now_, wake_);
        tell(pool_.tick(now_));
      } else {
        std::string text = "jobs wait for ever:";
        for (const auto& [id, job] : watcher.jobs)
          text += " kind " + std::to_string(job.spec.kind) + " need " + std::to_string(job.spec.need) + " gang " +
                  std::to_string(job.spec.gang) + " priority " + std::to_string(static_cast<int>(job.spec.priority));
        for (const PoolDecline& one : pool_.tick(now_).declines) text += "; " + pool_.describe(one);
        return text;
      }
    }
    return watcher.problem;
  }
  [[nodiscard]] bool planted() const { return planted_; }

 private:
  CostModel model() {
    return CostModel::affine(0.125 * static_cast<double>(draws_.integer(0, 4)),
                             0.125 * static_cast<double>(draws_.integer(1, 16)));
  }
  PoolOptions options() {
    PoolOptions made;
    constexpr Placement all[] = {
        Placement::automatic,   Placement::automatic, Placement::automatic,         Placement::any,
        Placement::round_robin, Placement::weighted,  Placement::least_outstanding, Placement::earliest_finish};
    made.placement = all[draws_.count(0, 7)];
    made.memory_margin_bytes = draws_.chance(0.5) ? 1.0 : 0.0;
    return made;
  }

  void tell(PoolDecisions decisions) {
    wake_ = decisions.wake_seconds;
    if (fault_ && !planted_) planted_ = fault_(pool_, *watcher_, decisions);
    watcher_->decided(now_, decisions);
  }
  void finish(RunResult result) {
    auto run = watcher_->runs.begin();
    std::advance(run, draws_.integer(0, std::ssize(watcher_->runs) - 1));
    const RunId id = run->first;
    watcher_->finished(id, result);
    tell(pool_.finish(now_, id, result, draws_.real(0.0, 3.0)));
  }
  void withdraw() {
    auto run = watcher_->runs.begin();
    std::advance(run, draws_.integer(0, std::ssize(watcher_->runs) - 1));
    const RunId id = run->first;
    std::optional<JobId> cancelled;
    if (draws_.chance(0.5)) cancelled = run->second.jobs[draws_.count(0, run->second.jobs.size() - 1)];
    watcher_->withdrawn(id);
    const PoolDecisions decisions = pool_.withdraw(now_, id, cancelled);
    if (cancelled) {
      EXPECT_EQ(std::ranges::count(decisions.ends, *cancelled, &PoolEnd::job), 1);
    }
    tell(decisions);
  }
  void event() {
    now_ += draws_.chance(0.3) ? draws_.real(0.0, 1.0) : draws_.real(0.0, 0.05);
    const double what = draws_.real(0.0, 1.0);
    const std::size_t device = draws_.count(0, pool_.device_count() - 1);
    if (what < 0.5) {
      submit();
    } else if (what < 0.75) {
      if (watcher_->runs.empty()) return;
      const double how = draws_.real(0.0, 1.0);
      finish(how < 0.8    ? RunResult::completed
             : how < 0.9  ? RunResult::failed
             : how < 0.97 ? RunResult::out_of_memory
                          : RunResult::device_lost);
    } else if (what < 0.85) {
      if (wake_ < std::numeric_limits<double>::infinity()) now_ = std::max(now_, wake_);
      tell(pool_.tick(now_));
    } else if (what < 0.9) {
      if (watcher_->jobs.empty()) return;
      auto job = watcher_->jobs.begin();
      std::advance(job, draws_.integer(0, std::ssize(watcher_->jobs) - 1));
      bool cancelled = false;
      const bool waits = job->second.phase == PoolWatcher::Phase::waits;
      const PoolDecisions decisions = pool_.cancel(now_, job->first, cancelled);
      EXPECT_EQ(cancelled, waits);
      tell(decisions);
    } else if (what < 0.92) {
      if (!watcher_->runs.empty()) withdraw();
    } else if (what < 0.94) {
      tell(pool_.retire(now_, device));
    } else if (what < 0.945) {
      watcher_->lost.insert(device);
      tell(pool_.lose(now_, device));
    } else if (what < 0.97) {
      watcher_->lost.erase(device);
      tell(pool_.restore(now_, device));
    } else {
      tell(pool_.measure(now_, device, draws_.count(0, kinds_ - 1), model(), draws_.integer(1, 4)));
    }
  }
  void submit() {
    PoolJob job{.kind = draws_.count(0, kinds_ - 1)};
    if (draws_.chance(0.3)) job.need = draws_.count(0, 2);
    job.priority = static_cast<Priority>(draws_.integer(0, 3));
    if (draws_.chance(0.3)) job.deadline_seconds = draws_.real(0.1, 10.0);
    if (draws_.chance(0.1)) job.not_before_seconds = draws_.real(0.0, 3.0);
    if (draws_.chance(0.1)) job.gang = draws_.integer(2, 3);
    if (pool_.kind(job.kind).padded) job.cost = 0.25 * static_cast<double>(draws_.integer(1, 16));
    job.tenant = draws_.count(0, tenants_ - 1);
    for (const auto& [id, other] : watcher_->jobs) {
      if (job.after.size() < 2 && draws_.chance(0.05)) job.after.push_back(id);
    }
    JobId id{};
    // The books need the job before the decisions, and its number is known only after them.
    const PoolDecisions decisions = pool_.submit(now_, job, id);
    watcher_->submitted(now_, id, job);
    tell(decisions);
  }

  Draws draws_;
  Fault fault_;
  PoolState pool_;
  PoolWatcher* watcher_ = nullptr;
  std::vector<PoolNeed> needs_;
  std::size_t kinds_ = 0;
  std::size_t tenants_ = 1;  // with the one without a name
  double now_ = 0.0;
  double wake_ = std::numeric_limits<double>::infinity();
  bool planted_ = false;
};

}  // namespace paceline::plan::testing
