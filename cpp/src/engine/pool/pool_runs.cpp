// SPDX-License-Identifier: Apache-2.0
//
// What happens on the workers, and what follows from an event.
#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>
#include <string>
#include <unordered_map>
#include <utility>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"
#include "runtime/worker.hpp"

namespace paceline::internal {
namespace {

constexpr double kBurst = 1.0;         // seconds, whose part of the budget may be spent at once
constexpr double kLongestSleep = 1e6;  // seconds; clocks cannot count much longer ones

plan::RunResult result_of(const std::exception_ptr& error) noexcept {
  if (error == nullptr) return plan::RunResult::completed;
  try {
    std::rethrow_exception(error);
  } catch (const OutOfMemory&) {
    return plan::RunResult::out_of_memory;
  } catch (const DeviceLost&) {
    return plan::RunResult::device_lost;
  } catch (...) {
    return plan::RunResult::failed;
  }
}

}  // namespace

NextWork PoolCore::next(DeviceId device, Clock::time_point) noexcept { return next_at(group_.place(device), *this); }

NextWork PoolCore::next_at(std::size_t place, const WorkSource& asked) noexcept {
  const Event* const event = settle(place);
  After after;
  NextWork answer;
  {
    const std::lock_guard lock(mutex_);
    const auto assigned = [&] { return devices_[place].run && !runs_.at(*devices_[place].run).taken; };
    // On the host a step that waits leaves its core idle, but a GPU is at its work meanwhile.
    Device& here = devices_[place];
    const bool lends = here.queue != nullptr && beside_gang_of_this_thread() != BesideGang::none;
    const double wait = lends ? until_budget(here) : 0.0;
    if (wait == 0.0) unblock(place, after);
    if (const double time = now(); !assigned() && time >= wake_seconds_) apply(state_.tick(time), after);
    if (wait > 0.0 && assigned()) block(place, after);
    const double until = std::min(clock_.started() ? kNever : wake_seconds_, here.blocked ? now() + wait : kNever);
    if (assigned()) {
      answer = take(runs_.at(*here.run), *here.run, lends, asked);
    } else if (complete()) {
      answer = NextWork::done();
      ++let_go_;
      room_.notify_all();
    } else {
      answer = until < kNever ? NextWork::wait(event, at(until)) : NextWork::wait(event);
    }
  }
  follow(std::move(after));
  return answer;
}

NextWork PoolCore::next_live(std::size_t place, const WorkSource& asked) noexcept {
  // While a step always has work, nobody asks next_at() for what a GPU has done.
  if (gpus_) (void)settle(place);
  if (complete()) return NextWork::done();
  const BesideGang beside = beside_gang_of_this_thread();
  if ((live_ == 0 && waiting_live_ == 0) || beside == BesideGang::none) return NextWork::wait();
  After after;
  NextWork answer = NextWork::wait();
  {
    const std::lock_guard lock(mutex_);
    Device& here = devices_[place];
    const auto begins = [&] { return here.run && !runs_.at(*here.run).taken; };
    // A step on the host that waits misses no time: next_at() comes to the job.
    const bool lends = beside == BesideGang::works || here.queue != nullptr;
    if (lends && (begins() || here.blocked) && until_budget(here) == 0.0) {
      unblock(place, after);
      // What was decided when the device was idle may be a job that a step comes before.
      if (begins() && !runs_.at(*here.run).live && waiting_live_ > 0) withdraw(*here.run, {}, after);
      if (begins() && runs_.at(*here.run).live) answer = take(runs_.at(*here.run), *here.run, true, asked);
    }
  }
  follow(std::move(after));
  return answer;
}

WorkSource::Clock::time_point PoolCore::at(double seconds) const noexcept {
  const std::chrono::duration<double> since(std::min(seconds, now() + kLongestSleep));
  return begin_ + std::chrono::duration_cast<Clock::duration>(since) + Clock::duration(1);
}

NextWork PoolCore::take(Run& run, plan::RunId id, bool lent, const WorkSource& asked) noexcept {
  run.taken = true;
  run.taken_by = &asked;
  run.lent = lent;
  if (run.live) --live_;
  return NextWork::take(static_cast<std::int64_t>(id));
}

double PoolCore::until_budget(Device& device) const noexcept {
  const double time = now();
  device.spent_seconds = std::max(0.0, device.spent_seconds - budget_ * (time - device.spent_until));
  device.spent_until = time;
  const double over = device.spent_seconds - budget_ * kBurst;
  if (budget_ > 0.0 && over < 0.0) return 0.0;
  return budget_ > 0.0 ? over / budget_ + 1e-3 : kNever;
}

void PoolCore::perform(DeviceId, std::int64_t work, Turn&) {
  Run* run = nullptr;
  const Pool::BatchCall* batch = nullptr;
  std::vector<const paceline::Device*> devices;
  std::vector<Stream*> streams;
  std::vector<JobQueue*> queues;
  std::vector<Job::Eviction> evicted;
  {
    const std::lock_guard lock(mutex_);
    run = &runs_.at(static_cast<plan::RunId>(work));  // stays where it is
    run->began = Clock::now();
    batch = &kind_list_[run->kind].call;
    for (const std::size_t place : run->devices) {
      Device& device = devices_[place];
      devices.push_back(&device.facts);
      streams.push_back(device.queue == nullptr ? nullptr : &device.queue->stream());
      if (device.queue != nullptr) queues.push_back(device.queue.get());
      for (std::string& model : device.evict) evicted.push_back({device.facts.name, std::move(model)});
      device.evict.clear();
    }
  }
  for (JobQueue* const queue : queues) queue->begin();
  Job job(std::move(devices), std::move(streams), std::move(evicted));
  std::exception_ptr error;
  try {
    const Inside guard(*this);
    if (*batch) {
      (*batch)(job, run->calls);
    } else {
      run->calls.front()->run(job);
    }
  } catch (...) {
    error = std::current_exception();
  }
  for (JobQueue* const queue : queues) queue->end();
  {
    const std::lock_guard lock(mutex_);
    run->excluded = job.excluded_seconds();
    run->loaded = job.load_seconds();
    run->enqueued = !queues.empty();
  }
  if (error != nullptr) std::rethrow_exception(error);
}

// Also what a call has enqueued before it threw uses what is freed when the job ends.
void PoolCore::done(DeviceId, std::int64_t work, const WorkTiming& timing) noexcept {
  if (is_enqueued(work, nullptr)) return;
  const double took = std::chrono::duration<double>(timing.finish - timing.start).count();
  finish(work, plan::RunResult::completed, took, {});
}

void PoolCore::failed(DeviceId, std::int64_t work, std::exception_ptr error) noexcept {
  if (is_enqueued(work, error)) return;
  finish(work, result_of(error), {}, error);
}

bool PoolCore::is_enqueued(std::int64_t work, const std::exception_ptr& error) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = runs_.find(static_cast<plan::RunId>(work));
  Run& run = found == runs_.end() ? given_up_.at(static_cast<plan::RunId>(work)) : found->second;
  run.error = error;
  run.taken_by = nullptr;
  return run.enqueued;
}

const Event* PoolCore::settle(std::size_t place) noexcept {
  plan::RunId id{};
  std::exception_ptr error;
  std::vector<const JobQueue*> queues;
  std::vector<Run> gone;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    if (!given_up_.empty()) gone = forget_given_up();
    if (!devices_[place].run) return nullptr;
    id = *devices_[place].run;
    const Run& run = runs_.at(id);
    if (!run.enqueued) return nullptr;
    error = run.error;
    for (const std::size_t one : run.devices) {
      if (devices_[one].queue != nullptr) queues.push_back(devices_[one].queue.get());
    }
  }
  std::optional<double> took;
  try {
    for (const JobQueue* const queue : queues) {
      if (!queue->done()) return &queue->ended();
    }
    for (const JobQueue* const queue : queues) took = std::max(took.value_or(0.0), queue->seconds());
  } catch (...) {  // what the GPU says comes before what the call has thrown, which may follow from it
    error = std::current_exception();
  }
  finish(static_cast<std::int64_t>(id), result_of(error), took, error);
  return nullptr;
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
    device.runs += completed ? 1 : 0;
    device.jobs += completed ? static_cast<std::int64_t>(run.jobs.size()) : 0;
    device.seconds += took;
    if (run.lent) {
      device.lent_seconds += took;
      device.spent_seconds += took;
    }
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
          {.run = id, .error = error, .report = {.device = device.facts.name, .seconds = took}});
    for (const JobId job : run.jobs) {  // those that run again
      if (const auto again = jobs_.find(job); again != jobs_.end() && again->second.run == id)
        set_run(again->second, {});
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
      if (devices_[one].facts.name == why.device()) place = one;
    }
  }
  devices_[place].lost = true;
  const RunEnding ending{.run = {}, .error = error, .report = {}};
  apply(state_.lose(now(), place), after, ending);
  vacate(place, after, ending);
  if (std::ranges::all_of(devices_, &Device::lost)) lost_ = error;
}

void PoolCore::apply(plan::PoolDecisions decisions, After& after, const RunEnding& ending) {
  std::unordered_map<JobId, std::exception_ptr> errors;  // of jobs that end now, before those that come after them
  for (const plan::PoolEnd& end : decisions.ends) {
    const auto job = jobs_.find(end.job);
    Ended& one = after.ended.emplace_back();
    const bool of_run = ending.run != plan::RunId{} && job->second.run == ending.run;
    const bool of_all = ending.run == plan::RunId{} && ending.error && end.outcome != plan::JobOutcome::expired;
    if (of_run) one.report = ending.report;
    const auto cause = end.cause ? errors.find(*end.cause) : errors.end();
    one.error = of_all                  ? ending.error
                : cause == errors.end() ? error_of(end, of_run ? ending.error : nullptr)
                                        : cancelled_after(cause->second);
    if (one.error) errors[end.job] = one.error;
    one.call = std::move(job->second.call);
    if (job->second.live && job->second.run == plan::RunId{}) --waiting_live_;
    jobs_.erase(job);
    ++ending_;
  }
  for (Device& device : devices_) device.declined.reset();
  for (const plan::PoolDecline& one : decisions.declines) devices_[one.device].declined = one;
  double by = kNever;
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
      run.begin_by = std::min(run.begin_by, job.deadline);
      set_run(job, start.run);
      run.live |= job.live;
      run.calls.push_back(job.call.get());
    }
    // Not earlier than the decisions allow for: otherwise what tick() takes back would come again at once.
    if (run.predicted >= 0.0) run.begin_by -= state_.margin(run.kind) * run.predicted;
    by = std::min(by, run.begin_by);
    if (run.live) ++live_;
    devices_[start.devices.front()].run = start.run;
    after.wake.push_back(&devices_[start.devices.front()]);
    after.room = true;
    runs_.emplace(start.run, std::move(run));
  }
  // Any worker may be the one that is idle and tells the time.
  if (decisions.wake_seconds < wake_seconds_ && !clock_.started()) after.wake_all = true;
  wake_seconds_ = decisions.wake_seconds;
  keep_time(after, by);
  if (!decisions.wants_devices) return;
  wants_devices_ = true;
  after.wants_devices = on_wants_devices_;
}

void PoolCore::follow(After after, bool asks) noexcept {
  if (after.ring < kNever) clock_.set(at(after.ring));
  if (after.room || !after.ended.empty()) room_.notify_all();
  if (asks && !after.ended.empty()) {  // a worker asks, since a call of then() may wait for what is placed
    const std::lock_guard lock(mutex_);
    after.wake_all |= placement_.open();
  }
  if (after.wake_all) {
    wake_everyone();
  } else {
    for (const Device* const device : after.wake) wake(*device);
  }
  if (after.wants_devices) after.wants_devices();
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
    asks = asks && begin_to_ask();
    ending_ -= told;
    complete = closed_ && jobs_.empty() && ending_ == 0 && !complete_.exchange(true, std::memory_order_acq_rel);
    if (complete && clock_.started()) clock_.end();
  }
  if (complete) {
    wake_everyone();
    wake_caller();
  }
  if (asks) place_by_user();
}

}  // namespace paceline::internal
