// SPDX-License-Identifier: Apache-2.0
//
// Runs that take too long.
#include <utility>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

void PoolCore::visit_runs_over(double seconds, const Pool::Visit& visit) const {
  check_process("watch");
  const std::lock_guard lock(mutex_);
  const auto begun_before = Clock::now() - std::chrono::duration<double>(seconds);
  for (const auto& [id, run] : runs_) {
    if (run.taken && run.began != Clock::time_point{} && run.began < begun_before)
      visit(id, group_.devices()[run.devices.front()], kind_list_[run.kind].name, run.calls);
  }
}

bool PoolCore::give_up(plan::RunId id, const std::exception_ptr& error) {
  check_process("watch");
  std::size_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = runs_.find(id);
    if (found == runs_.end() || !found->second.taken) return false;
    first = found->second.devices.front();
  }
  // Before the jobs end, so that the worker asks for nothing else in between. If it is in another run by now, that run
  // ends there, and its device starts nothing else before.
  (void)group_.replace_worker(group_.ids()[first], *this);
  After after;
  {
    const std::lock_guard lock(mutex_);
    const auto found = runs_.find(id);
    if (found == runs_.end()) return false;
    auto run = runs_.extract(found);  // stays where it is, for perform()
    for (const std::size_t place : run.mapped().devices) devices_[place].run.reset();
    for (const JobId job : run.mapped().jobs) run.mapped().kept.push_back(jobs_.at(job).call);
    const double took = std::chrono::duration<double>(Clock::now() - run.mapped().began).count();
    given_up_.insert(std::move(run));
    apply(state_.finish(now(), id, plan::RunResult::given_up, took), after,
          {.run = id, .error = error, .report = {.device = group_.devices()[first].name, .seconds = took}});
    if (cancelling_) end_waiting(std::make_exception_ptr(Cancelled(kJobOfClosedPool)), after);
  }
  follow(std::move(after));
  return true;
}

}  // namespace paceline::internal
