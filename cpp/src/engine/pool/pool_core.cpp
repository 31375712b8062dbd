// SPDX-License-Identifier: Apache-2.0
#include "engine/pool/pool_core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

namespace paceline::internal {
namespace {

constexpr double kLongestSleep = 1e6;  // seconds; clocks cannot count much longer ones
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::chrono::milliseconds kBetweenLooks{50};
constexpr const char* kDependency = "The job was cancelled, since a job that it comes after did not complete.";

thread_local const PoolCore* inside = nullptr;  // the pool whose job this thread runs

}  // namespace

PoolCore::PoolCore(const DeviceGroup& group, plan::PoolOptions options)
    : group_(group), state_(std::move(options)), devices_(group.size()) {
  for (const paceline::Device& device : group.devices()) {
    (void)state_.add_device(0.0, {.name = device.name,
                                  .device_class = device.device_class,
                                  .labels = {device.kind == DeviceKind::host ? "host" : "cuda"}});
  }
}

double PoolCore::seconds(Clock::time_point time) const { return std::chrono::duration<double>(time - begin_).count(); }

std::size_t PoolCore::kind_of(const std::string& name) {
  const auto known = kinds_.find(name);
  if (known != kinds_.end()) return known->second;
  const std::size_t kind = state_.add_kind({.name = name});
  kind_list_.push_back({.call = {}, .times = std::vector<RunTimes>(devices_.size())});
  return kinds_[name] = kind;
}

std::size_t PoolCore::need_of(std::vector<std::string> labels) {
  if (labels.empty()) return 0;
  std::ranges::sort(labels);
  const auto known = needs_.find(labels);
  if (known != needs_.end()) return known->second;
  const std::size_t need = state_.add_need({.labels = labels, .accepts = {}});
  return needs_[std::move(labels)] = need;
}

void PoolCore::add_batches(const std::string& kind, const BatchOptions& options, Pool::BatchCall call) {
  const std::lock_guard lock(mutex_);
  if (kinds_.contains(kind)) {
    throw InvalidArgument(fmt::format("serve: the pool has a kind '{}' already. Give this one another name.", kind));
  }
  constexpr std::int64_t largest = 1 << 30;
  if (options.max_batch < 1 || options.max_batch > largest) {
    throw InvalidArgument(fmt::format("serve: max_batch is {}; it must be from 1 to {}.", options.max_batch, largest));
  }
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1; size < options.max_batch; size *= 2) sizes.push_back(size);
  sizes.push_back(options.max_batch);
  kinds_[kind] = state_.add_kind(
      {.name = kind, .sizes = std::move(sizes), .max_delay_seconds = options.max_delay_seconds, .idempotent = true});
  kind_list_.push_back({.call = std::move(call), .times = std::vector<RunTimes>(devices_.size())});
}

JobId PoolCore::submit(std::unique_ptr<PoolCall> call, const JobOptions& options) {
  plan::PoolJob job{.priority = options.priority,
                    .deadline_seconds = options.deadline_seconds,
                    .not_before_seconds = options.not_before_seconds,
                    .gang = options.gang};
  for (const JobHandle& other : options.after) {
    if (other.state == nullptr || other.pool.lock().get() != this) {
      throw InvalidArgument("submit: after= has a job of another pool, or of one that is gone. Wait for it before.");
    }
    job.after.push_back(other.id);
  }
  JobId id{};
  After after;
  for (const JobState* waits_for = nullptr;; waits_for->wait()) {
    std::unique_lock lock(mutex_);
    job.kind = kind_of(options.kind);
    if (call->batched() != static_cast<bool>(kind_list_[job.kind].call)) {
      throw InvalidArgument(fmt::format("submit: '{}' is {}. Give this job another kind.", options.kind,
                                        call->batched() ? "no kind that is served" : "a kind that is served"));
    }
    job.need = need_of(options.needs);
    if (options.wait_for_room && inside == nullptr) wait_for_room(lock, job.kind);
    if (closed_) throw Unavailable("submit: the pool is closed. Make a new one.");
    bool failed = false;
    waits_for = nullptr;
    for (const JobHandle& other : options.after) {
      if (jobs_.contains(other.id)) continue;
      if (!other.state->ended()) {
        waits_for = other.state.get();  // another thread is about to tell how it ended
      } else {
        failed |= other.state->error() != nullptr;
      }
    }
    if (waits_for != nullptr) continue;
    if (failed) {
      Ended& one = after.ended.emplace_back();
      one.call = std::move(call);
      one.error = std::make_exception_ptr(Cancelled(kDependency));
    } else {
      plan::PoolDecisions decisions = state_.submit(seconds(Clock::now()), job, id);
      jobs_.emplace(id, std::move(call));
      apply(std::move(decisions), after);
    }
    break;
  }
  follow(std::move(after));
  return id;
}

void PoolCore::wait_for_room(std::unique_lock<std::mutex>& lock, std::size_t kind) {
  const auto may_go_on = [&] { return closed_ || state_.has_room(kind); };
  while (!may_go_on()) {
    lock.unlock();
    {
      BlockingRegion region;
      lock.lock();
      room_.wait_for(lock, kBetweenLooks, may_go_on);
      lock.unlock();  // not held while this thread waits for the interpreter
      region.poll();
    }
    lock.lock();
  }
}

bool PoolCore::cancel(JobId id) {
  bool cancelled = false;
  After after;
  {
    const std::lock_guard lock(mutex_);
    apply(state_.cancel(seconds(Clock::now()), id, cancelled), after);
  }
  follow(std::move(after));
  return cancelled;
}

void PoolCore::retire(const std::string& device, bool retired) {
  const auto found = std::ranges::find(group_.devices(), device, &paceline::Device::name);
  if (found == group_.devices().end()) {
    throw InvalidArgument(fmt::format("{}: the pool has no device '{}'.", retired ? "retire" : "restore", device));
  }
  const auto place = static_cast<std::size_t>(found - group_.devices().begin());
  After after;
  {
    const std::lock_guard lock(mutex_);
    const double now = seconds(Clock::now());
    apply(retired ? state_.retire(now, place) : state_.restore(now, place), after);
  }
  follow(std::move(after));
}

void PoolCore::close(bool cancel) noexcept {
  After after;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    std::vector<JobId> waiting;
    if (cancel) {
      for (const auto& [id, call] : jobs_) waiting.push_back(id);
    }
    for (const JobId id : waiting) {
      bool cancelled = false;
      apply(state_.cancel(seconds(Clock::now()), id, cancelled), after);
    }
    if (jobs_.empty()) complete_.store(true, std::memory_order_release);
  }
  room_.notify_all();
  follow(std::move(after));
  wake_all();
  wake_caller();
}

std::int64_t PoolCore::waiting() const {
  const std::lock_guard lock(mutex_);
  return state_.waiting();
}

std::int64_t PoolCore::running() const {
  const std::lock_guard lock(mutex_);
  return state_.running();
}

std::string PoolCore::explain() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (std::size_t place = 0; place < devices_.size(); ++place) {
    const Device& device = devices_[place];
    text += fmt::format("{}: {} jobs in {} runs, {:.3f} s", group_.devices()[place].name, device.jobs, device.runs,
                        device.seconds);
    if (!state_.active(place)) text += "; retired";
    if (device.declined) text += "; " + state_.describe(*device.declined);
    text += "\n";
  }
  return text + fmt::format("{} jobs wait, {} runs go on\n", state_.waiting(), state_.running());
}

NextWork PoolCore::next(DeviceId device, Clock::time_point now) noexcept {
  After after;
  NextWork answer;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t place = group_.place(device);
    const auto assigned = [&] { return devices_[place].run && !runs_.at(*devices_[place].run).taken; };
    if (!assigned() && seconds(now) >= wake_seconds_) apply(state_.tick(seconds(now)), after);
    if (assigned()) {
      Run& run = runs_.at(*devices_[place].run);
      run.taken = true;
      answer = NextWork::take(static_cast<std::int64_t>(*devices_[place].run));
    } else if (complete()) {
      answer = NextWork::done();
    } else if (wake_seconds_ < kNever) {
      const double wake = std::min(wake_seconds_, seconds(now) + kLongestSleep);
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
  {
    const std::lock_guard lock(mutex_);
    run = &runs_.at(static_cast<plan::RunId>(work));  // stays where it is
    batch = &kind_list_[run->kind].call;
  }
  std::vector<const paceline::Device*> devices;
  for (const std::size_t place : run->devices) devices.push_back(&group_.devices()[place]);
  Job job(std::move(devices));
  inside = this;
  const auto leave = [](const PoolCore*) { inside = nullptr; };
  const std::unique_ptr<const PoolCore, decltype(leave)> guard(this, leave);
  if (*batch) {
    (*batch)(job, run->calls);
  } else {
    run->calls.front()->run(job);
  }
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
  } catch (...) {
  }
  finish(work, result, 0.0, error);
}

void refuse_wait_inside(const std::weak_ptr<PoolCore>& pool) {
  if (inside != nullptr && pool.lock().get() == inside) {
    throw InvalidArgument(
        "wait: a job waits for a job of its own pool. It would keep its device meanwhile, which the other may need. "
        "Use "
        "JobOptions::after, or Future::then.");
  }
}

void PoolCore::cancel(std::exception_ptr) noexcept { close(true); }

void PoolCore::finish(std::int64_t work, plan::RunResult result, double took,
                      const std::exception_ptr& error) noexcept {
  After after;
  {
    const std::lock_guard lock(mutex_);
    const auto found = runs_.find(static_cast<plan::RunId>(work));
    const Run run = std::move(found->second);
    runs_.erase(found);
    const std::size_t first = run.devices.front();
    const JobReport report{.device = group_.devices()[first].name, .seconds = took};
    for (const std::size_t place : run.devices) devices_[place].run.reset();
    const double now = seconds(Clock::now());
    const bool completed = result == plan::RunResult::completed;
    Device& device = devices_[first];
    ++device.runs;
    device.jobs += completed ? static_cast<std::int64_t>(run.jobs.size()) : 0;
    device.seconds += took;
    if (completed) {
      RunTimes& times = kind_list_[run.kind].times[first];
      times.add(static_cast<std::int64_t>(run.jobs.size()), took);
      // The devices of the run are still taken, so this decides nothing about them.
      apply(state_.measure(now, first, run.kind, times.model(), times.samples()), after);
    }
    apply(state_.finish(now, static_cast<plan::RunId>(work), result, took), after, error, report);
  }
  follow(std::move(after));
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
            "The job was not taken: the pool has too few devices that satisfy its needs and have the memory."));
      }
      return std::make_exception_ptr(
          Rejected("The job was not taken: by the measured times it cannot end by its deadline."));
    case JobOutcome::expired:
      return std::make_exception_ptr(Expired("The job waited until it could no longer end by its deadline."));
    case JobOutcome::cancelled:
      return std::make_exception_ptr(
          Cancelled(end.reason == PoolReason::dependency ? kDependency : "The job was cancelled before it began."));
    case JobOutcome::failed:
      break;
  }
  if (thrown) return thrown;
  return std::make_exception_ptr(OutOfMemory("The job fits in the memory of no device that is left."));
}

void PoolCore::apply(plan::PoolDecisions decisions, After& after, const std::exception_ptr& error,
                     const JobReport& report) {
  for (const plan::PoolEnd& end : decisions.ends) {
    const auto job = jobs_.find(end.job);
    const bool ran = end.outcome == plan::JobOutcome::completed || end.outcome == plan::JobOutcome::failed;
    Ended& one = after.ended.emplace_back();
    one.call = std::move(job->second);
    if (ran) one.report = report;
    one.error = error_of(end, error);
    jobs_.erase(job);
  }
  for (Device& device : devices_) device.declined.reset();
  for (const plan::PoolDecline& one : decisions.declines) devices_[one.device].declined = one;
  for (plan::PoolStart& start : decisions.starts) {
    Run run{.devices = start.devices, .jobs = start.jobs, .calls = {}, .kind = start.kind};
    for (const JobId id : start.jobs) run.calls.push_back(jobs_.at(id).get());
    devices_[start.devices.front()].run = start.run;
    after.wake.push_back(start.devices.front());
    runs_.emplace(start.run, std::move(run));
  }
  // Whichever worker is idle tells the time.
  if (decisions.wake_seconds < wake_seconds_) {
    for (std::size_t place = 0; place < devices_.size(); ++place) after.wake.push_back(place);
  }
  wake_seconds_ = decisions.wake_seconds;
  if (closed_ && jobs_.empty()) complete_.store(true, std::memory_order_release);
}

void PoolCore::follow(After after) noexcept {
  if (!after.ended.empty()) room_.notify_all();
  for (const std::size_t place : after.wake) wake(group_.ids()[place]);
  for (const Ended& one : after.ended) one.call->end(one.report, one.error);
  if (complete()) {
    wake_all();
    wake_caller();
  }
}

}  // namespace paceline::internal
