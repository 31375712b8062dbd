// SPDX-License-Identifier: Apache-2.0
//
// What happens on the workers, and what follows from an event.
#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>
#include <utility>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kLongestSleep = 1e6;  // seconds; clocks cannot count much longer ones

}  // namespace

NextWork PoolCore::next(DeviceId device, Clock::time_point) noexcept {
  After after;
  NextWork answer;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t place = group_.place(device);
    const auto assigned = [&] { return devices_[place].run && !runs_.at(*devices_[place].run).taken; };
    if (const double time = now(); !assigned() && time >= wake_seconds_) apply(state_.tick(time), after);
    if (assigned()) {
      Run& run = runs_.at(*devices_[place].run);
      run.taken = true;
      answer = NextWork::take(static_cast<std::int64_t>(*devices_[place].run));
    } else if (complete()) {
      answer = NextWork::done();
      ++let_go_;
      room_.notify_all();
    } else if (wake_seconds_ < kNever) {
      const double wake = std::min(wake_seconds_, now() + kLongestSleep);
      const auto until = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wake));
      answer = NextWork::wait(nullptr, begin_ + until + Clock::duration(1));
    } else {
      answer = NextWork::wait();
    }
  }
  follow(std::move(after));
  return answer;
}

void PoolCore::perform(DeviceId, std::int64_t work, Turn&) {
  Run* run = nullptr;
  const Pool::BatchCall* batch = nullptr;
  std::vector<Job::Eviction> evicted;
  {
    const std::lock_guard lock(mutex_);
    run = &runs_.at(static_cast<plan::RunId>(work));  // stays where it is
    run->began = Clock::now();
    batch = &kind_list_[run->kind].call;
    for (const std::size_t place : run->devices) {
      for (std::string& model : devices_[place].evict)
        evicted.push_back({group_.devices()[place].name, std::move(model)});
      devices_[place].evict.clear();
    }
  }
  std::vector<const paceline::Device*> devices;
  for (const std::size_t place : run->devices) devices.push_back(&group_.devices()[place]);
  Job job(std::move(devices), std::move(evicted));
  const Inside guard(*this);
  if (*batch) {
    (*batch)(job, run->calls);
  } else {
    run->calls.front()->run(job);
  }
  run->excluded = job.excluded_seconds();  // for finish(), on this thread
  run->loaded = job.load_seconds();
}

void PoolCore::done(DeviceId, std::int64_t work, const WorkTiming& timing) noexcept {
  const double took = std::chrono::duration<double>(timing.finish - timing.start).count();
  finish(work, plan::RunResult::completed, took, {});
}

void PoolCore::failed(DeviceId, std::int64_t work, std::exception_ptr error) noexcept {
  auto result = plan::RunResult::failed;
  try {
    std::rethrow_exception(error);
  } catch (const OutOfMemory&) {
    result = plan::RunResult::out_of_memory;
  } catch (const DeviceLost&) {
    result = plan::RunResult::device_lost;
  } catch (...) {
  }
  finish(work, result, {}, error);
}

void PoolCore::cancel(std::exception_ptr) noexcept { close(true); }

void PoolCore::finish(std::int64_t work, plan::RunResult result, std::optional<double> timed,
                      const std::exception_ptr& error) noexcept {
  After after;
  decltype(given_up_)::node_type gone;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    const auto id = static_cast<plan::RunId>(work);
    const auto found = runs_.find(id);
    if (found == runs_.end()) {
      gone = given_up_.extract(id);
      return;
    }
    const Run run = std::move(found->second);
    const double took = timed ? *timed : std::chrono::duration<double>(Clock::now() - run.began).count();
    runs_.erase(found);
    const std::size_t first = run.devices.front();
    for (const std::size_t place : run.devices) devices_[place].run.reset();
    const bool completed = result == plan::RunResult::completed;
    Device& device = devices_[first];
    ++device.runs;
    device.jobs += completed ? static_cast<std::int64_t>(run.jobs.size()) : 0;
    device.seconds += took;
    const bool counts = std::isfinite(run.excluded);
    const double counted = counts ? std::max(took - run.excluded, 0.0) : run.predicted >= 0.0 ? run.predicted : 0.0;
    if (completed && counts) {
      if (run.loaded && !state_.kind(run.kind).model.empty()) apply(state_.loaded(now(), run.kind, *run.loaded), after);
      plan::LineFit& times = kind_list_[run.kind].times[first];
      times.add(run.cost, counted);
      // The devices of the run are still taken, so this decides nothing about them.
      apply(state_.measure(now(), first, run.kind, times.model(), times.samples()), after);
    }
    if (result == plan::RunResult::device_lost) lose(run, error, after);
    apply(state_.finish(now(), id, result, counted), after,
          {.run = id, .error = error, .report = {.device = group_.devices()[first].name, .seconds = took}});
    for (const JobId job : run.jobs) {  // those that run again
      if (const auto again = jobs_.find(job); again != jobs_.end() && again->second.run == id) again->second.run = {};
    }
    if (cancelling_) end_waiting(std::make_exception_ptr(Cancelled(kJobOfClosedPool)), after);
  }
  follow(std::move(after));
}

void PoolCore::lose(const Run& run, const std::exception_ptr& error, After& after) {
  std::size_t place = run.devices.front();
  try {
    std::rethrow_exception(error);
  } catch (const Error& why) {
    for (const std::size_t one : run.devices) {
      if (group_.devices()[one].name == why.device()) place = one;
    }
  }
  devices_[place].lost = true;
  const RunEnding ending{.run = {}, .error = error, .report = {}};
  apply(state_.lose(now(), place), after, ending);
  vacate(place, after, ending);
  if (std::ranges::all_of(devices_, &Device::lost)) lost_ = error;
}

std::exception_ptr PoolCore::error_of(const plan::PoolEnd& end, const std::exception_ptr& thrown) const {
  using plan::JobOutcome;
  using plan::PoolReason;
  switch (end.outcome) {
    case JobOutcome::completed:
      return {};
    case JobOutcome::rejected:
      if (end.reason == PoolReason::queue_full) {
        return std::make_exception_ptr(
            Rejected("The job was not taken: the queue of its kind is full. Let submit wait, or submit less."));
      }
      if (end.reason == PoolReason::no_device) {
        return std::make_exception_ptr(Rejected(
            "The job was not taken: the pool has too few devices that satisfy its needs, have the memory and are not "
            "lost."));
      }
      return std::make_exception_ptr(
          Rejected("The job was not taken: by the measured times it cannot end by its deadline."));
    case JobOutcome::expired:
      return std::make_exception_ptr(Expired("The job waited until it could no longer end by its deadline."));
    case JobOutcome::cancelled:
      return std::make_exception_ptr(Cancelled(end.reason == PoolReason::dependency ? kJobDependency : kJobOnRequest));
    case JobOutcome::failed:
      break;
  }
  if (thrown) return thrown;
  if (end.reason == PoolReason::device_lost)
    return std::make_exception_ptr(DeviceLost("The devices that could run the job are lost."));
  return std::make_exception_ptr(OutOfMemory("The job fits in the memory of no device that is left."));
}

void PoolCore::apply(plan::PoolDecisions decisions, After& after, const RunEnding& ending) {
  for (const plan::PoolEnd& end : decisions.ends) {
    const auto job = jobs_.find(end.job);
    Ended& one = after.ended.emplace_back();
    const bool of_run = ending.run != plan::RunId{} && job->second.run == ending.run;
    const bool of_all = ending.run == plan::RunId{} && ending.error && end.outcome != plan::JobOutcome::expired;
    if (of_run) one.report = ending.report;
    one.error = of_all ? ending.error : error_of(end, of_run ? ending.error : nullptr);
    one.call = std::move(job->second.call);
    jobs_.erase(job);
    ++ending_;
  }
  for (Device& device : devices_) device.declined.reset();
  for (const plan::PoolDecline& one : decisions.declines) devices_[one.device].declined = one;
  for (plan::PoolStart& start : decisions.starts) {
    Run run{.devices = start.devices,
            .jobs = start.jobs,
            .calls = {},
            .kind = start.kind,
            .cost = start.cost,
            .predicted = start.predicted_seconds};
    for (plan::PoolEviction& one : start.evict) devices_[one.device].evict.push_back(std::move(one.model));
    for (const JobId id : start.jobs) {
      Waiting& job = jobs_.at(id);
      job.run = start.run;
      run.calls.push_back(job.call.get());
    }
    devices_[start.devices.front()].run = start.run;
    after.wake.push_back(start.devices.front());
    after.room = true;
    runs_.emplace(start.run, std::move(run));
  }
  // Any worker may be the one that is idle and tells the time.
  if (decisions.wake_seconds < wake_seconds_) after.wake_all = true;
  wake_seconds_ = decisions.wake_seconds;
}

void PoolCore::follow(After after) noexcept {
  if (after.room || !after.ended.empty()) room_.notify_all();
  if (after.wake_all) {
    wake_all();
  } else {
    for (const std::size_t place : after.wake) wake(group_.ids()[place]);
  }
  const std::size_t told = after.ended.size();
  if (told > 0) {
    const Inside guard(*this);  // complete() waits for what is called here
    for (const Ended& one : after.ended) one.call->end(one.report, one.error);
    after.ended.front().call->together([&ended = after.ended] {
      for (const Ended& one : ended) one.call->call_back();
      for (Ended& one : ended | std::views::drop(1)) one.call.reset();  // what jobs have captured, too
    });
    after.ended.clear();
  }
  bool complete = false;
  {
    const std::lock_guard lock(mutex_);
    ending_ -= told;
    complete = closed_ && jobs_.empty() && ending_ == 0 && !complete_.exchange(true, std::memory_order_acq_rel);
  }
  if (complete) {
    wake_all();
    wake_caller();
  }
}

}  // namespace paceline::internal
