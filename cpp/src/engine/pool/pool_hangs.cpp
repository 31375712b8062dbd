// SPDX-License-Identifier: Apache-2.0
//
// Runs that take too long.
#include <algorithm>
#include <iterator>
#include <utility>

#include <paceline/error.hpp>

#include "engine/pool/added_device.hpp"
#include "engine/pool/pool_core.hpp"

namespace paceline::internal {
namespace {

/// Whether the GPU has done it. One that has failed does nothing any more.
bool queue_is_over(const std::unique_ptr<JobQueue>& queue) noexcept {
  try {
    return queue == nullptr || queue->done();
  } catch (...) {
    return true;
  }
}

}  // namespace

void PoolCore::visit_runs_over(double seconds, const Pool::Visit& visit) const {
  check_process("watch");
  const std::lock_guard lock(mutex_);
  const auto begun_before = Clock::now() - std::chrono::duration<double>(seconds);
  for (const auto& [id, run] : runs_) {
    if (run.taken && run.began != Clock::time_point{} && run.began < begun_before)
      visit(id, devices_[run.devices.front()].facts, kind_list_[run.kind].name, run.calls);
  }
}

bool PoolCore::give_up(plan::RunId id, const std::exception_ptr& error) {
  check_process("watch");
  std::vector<Device*> devices;  // stay where they are
  const WorkSource* taken_by = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = runs_.find(id);
    if (found == runs_.end() || !found->second.taken) return false;
    for (const std::size_t place : found->second.devices) devices.push_back(&devices_[place]);
    taken_by = found->second.taken_by;
  }
  std::vector<std::unique_ptr<JobQueue>> queues;  // in the place of those that the run goes on with
  for (const Device* const device : devices) queues.push_back(JobQueue::of(device->facts));
  // Before the jobs end, so that the worker asks for nothing else in between. If it is in another run by now, that run
  // ends there, and its device starts nothing else before.
  Device& first = *devices.front();
  if (const auto added = taken_by == nullptr ? nullptr : first.source.lock()) {
    (void)added->replace_worker(*taken_by);
  } else if (taken_by != nullptr) {
    (void)group_.replace_worker(first.id, *taken_by);
  }
  After after;
  {
    const std::lock_guard lock(mutex_);
    const auto found = runs_.find(id);
    if (found == runs_.end()) return false;
    auto node = runs_.extract(found);  // stays where it is, for perform()
    Run& run = node.mapped();
    for (std::size_t k = 0; k < devices.size(); ++k) {
      devices[k]->run.reset();
      std::swap(devices[k]->queue, queues[k]);
    }
    run.queues = std::move(queues);
    for (const JobId job : run.jobs) run.kept.push_back(jobs_.at(job).call);
    const double took = std::chrono::duration<double>(Clock::now() - run.began).count();
    first.seconds += took;
    if (run.lent) {
      first.lent_seconds += took;
      first.spent_seconds += took;
    }
    given_up_.insert(std::move(node));
    apply(state_.finish(now(), id, plan::RunResult::given_up, took), after,
          {.run = id, .error = error, .report = {.device = first.facts.name, .seconds = took}});
    if (cancelling_) end_waiting(std::make_exception_ptr(Cancelled(kJobOfClosedPool)), after);
  }
  follow(std::move(after));
  return true;
}

std::vector<PoolCore::Run> PoolCore::forget_given_up() noexcept {
  std::vector<Run> gone;
  for (auto one = given_up_.begin(); one != given_up_.end();) {
    const bool over = one->second.enqueued && one->second.taken_by == nullptr &&
                      std::ranges::all_of(one->second.queues, queue_is_over);
    if (over) gone.push_back(std::move(one->second));
    one = over ? given_up_.erase(one) : std::next(one);
  }
  return gone;
}

}  // namespace paceline::internal
