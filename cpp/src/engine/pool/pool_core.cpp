// SPDX-License-Identifier: Apache-2.0
#include "engine/pool/pool_core.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <ranges>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/turn.hpp>

#include "plural.hpp"

namespace paceline::internal {
namespace {

constexpr std::chrono::milliseconds kBetweenLooksForRoom{50};
constexpr std::chrono::milliseconds kLetGo{200};  // a thousand times what an idle worker needs
constexpr std::int64_t kLargestBatch = 1 << 30;

thread_local const Inside* innermost_pool = nullptr;

// A sentence, with those that have most to wait for; empty where nobody has a name.
std::string tenants_text(std::vector<plan::PoolTenantUse> all) {
  constexpr std::size_t most = 8;
  if (all.size() == 1) return {};
  std::erase_if(all, [](const plan::PoolTenantUse& one) { return one.waiting == 0 && one.served <= 0.0; });
  std::ranges::stable_sort(all, std::greater<>(), &plan::PoolTenantUse::waiting);
  std::string text = "Tenants, by what waits:";
  for (const plan::PoolTenantUse& one : all | std::views::take(most)) {
    text += fmt::format(" {} {} wait, {:.4g} served, weight {:.3g};",
                        one.tenant.name.empty() ? "without a name" : one.tenant.name, one.waiting, one.served,
                        one.tenant.weight);
  }
  if (all.empty()) text += " none has had a job;";
  text.back() = '.';
  return text + (all.size() > most ? fmt::format(" And {} more.\n", all.size() - most) : "\n");
}

}  // namespace

Inside::Inside(const PoolCore& pool) noexcept : pool_(pool), outer_(std::exchange(innermost_pool, this)) {}
Inside::~Inside() { innermost_pool = outer_; }

bool Inside::any() noexcept { return innermost_pool != nullptr || Turn::of_this_thread() != nullptr; }

bool Inside::of(const PoolCore& pool) noexcept {
  const Inside* one = innermost_pool;
  while (one != nullptr && &one->pool_ != &pool) one = one->outer_;
  return one != nullptr;
}

void check_may_wait(const std::weak_ptr<PoolCore>& pool) {
  if (Inside::any()) {
    throw InvalidArgument(
        "wait: a job, a step, a placement or a call of then() waits for a pool, and keeps a device or the end of a job "
        "that the pool may need to go on. Use JobOptions::after or Future::then.");
  }
  const auto core = pool.lock();
  if (core != nullptr && core->forked())
    throw Unavailable("wait: the pool's workers are in another process, the parent.");
}

PoolCore::PoolCore(const DeviceGroup& group, plan::PoolOptions options, double budget,
                   const std::map<std::string, double>& memory_bytes)
    : group_(group), budget_(budget), state_([&] {
        if (options.choose) options.choose = placement_.look_up(std::move(options.choose));
        return std::move(options);
      }()) {
  for (const auto& [name, bytes] : memory_bytes) {
    if (std::ranges::find(group.devices(), name, &paceline::Device::name) == group.devices().end())
      throw InvalidArgument(fmt::format("Pool: memory= has '{}', and the pool has no such device.", name));
  }
  for (const DeviceId id : group.ids()) {
    const paceline::Device& device = group.device(id);
    const auto memory = memory_bytes.find(device.name);
    (void)place({.facts = device, .queue = JobQueue::of(device), .id = id},
                memory == memory_bytes.end() ? kNever : memory->second);
  }
}

PoolCore::~PoolCore() {
  if (forked()) return;
  // What no worker will come to.
  for (auto& [id, job] : jobs_) job.call->end({}, std::make_exception_ptr(Cancelled(kJobOfClosedPool)));
  for (auto& [id, job] : jobs_) job.call->call_back();
  (void)forget_given_up();
  if (given_up_.empty()) return;
  // A GPU that hangs may still write to what these runs use, so that is never freed. The list has a name, so that leak
  // checkers see it.
  static std::mutex mutex;
  static auto* const kept = new std::vector<decltype(given_up_)>;
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(given_up_));
}

bool PoolCore::forked() const noexcept { return getpid() != owner_; }

void PoolCore::check_process(const char* call) const {
  if (forked()) throw Unavailable(fmt::format("{}: the pool's workers are in another process, the parent.", call));
}

double PoolCore::now() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

std::size_t PoolCore::kind_of(const JobOptions& options, bool batched) {
  const std::pair key(options.kind, options.memory_bytes);
  const auto known = kinds_.find(key);
  const bool served = known != kinds_.end() && kind_list_[known->second].call;
  if (batched != served) {
    throw InvalidArgument(fmt::format("submit: '{}' is {}. Give this job another kind.", options.kind,
                                      batched ? "no kind that is served" : "a kind that is served"));
  }
  if (known != kinds_.end()) return known->second;
  const std::size_t kind = state_.add_kind({.name = options.kind, .peak_bytes = options.memory_bytes});
  keep_kind(kind, options.kind, {});
  return kinds_[key] = kind;
}

std::size_t PoolCore::need_of(const JobOptions& options) {
  std::pair key(options.needs, options.devices);
  if (key.first.empty() && key.second.empty()) return 0;
  std::ranges::sort(key.first);
  std::ranges::sort(key.second);
  const auto known = needs_.find(key);
  if (known != needs_.end()) return known->second;
  const auto accepts = [names = key.second](const plan::PoolDevice& device) {
    return names.empty() || std::ranges::count(names, device.name) > 0;
  };
  const std::size_t need = state_.add_need({.labels = key.first, .accepts = accepts});
  return needs_[std::move(key)] = need;
}

std::exception_ptr PoolCore::no_device(const JobOptions& options, std::size_t kind) const {
  std::string text =
      "The job was not taken: the pool has too few devices that satisfy its needs, have the memory and are not lost. "
      "It needs ";
  text += options.gang == 1 ? "one" : fmt::format("{} at once", options.gang);
  if (!options.needs.empty()) text += fmt::format(", with the labels {}", fmt::join(options.needs, ", "));
  if (!options.devices.empty()) text += fmt::format(", out of {}", fmt::join(options.devices, ", "));
  const plan::PoolKind& spec = state_.kind(kind);
  const double bytes = spec.resident_bytes + spec.peak_bytes + spec.peak_bytes_per_item;
  if (bytes > 0.0) text += fmt::format(", with {:.4g} bytes for it", bytes);
  text += ". The pool has";
  for (std::size_t place = 0; place < devices_.size(); ++place) {
    const plan::PoolDevice& device = state_.device(place);
    text += fmt::format("{} {} ({}", place == 0 ? "" : ",", device.name, fmt::join(device.labels, ", "));
    if (device.memory_bytes < std::numeric_limits<double>::infinity())
      text += fmt::format(", {:.4g} bytes", device.memory_bytes);
    text += devices_[place].lost ? ", lost)" : ")";
  }
  return std::make_exception_ptr(Rejected(text + "."));
}

void PoolCore::add_batches(const std::string& kind, const BatchOptions& options, Pool::BatchCall call) {
  check_process("serve");
  const std::lock_guard lock(mutex_);
  if (kinds_.contains({kind, 0.0})) {
    throw InvalidArgument(fmt::format("serve: the pool has a kind '{}' already. Give this one another name.", kind));
  }
  if (options.max_batch < 1 || options.max_batch > kLargestBatch) {
    throw InvalidArgument(
        fmt::format("serve: max_batch is {}; it must be from 1 to {}.", options.max_batch, kLargestBatch));
  }
  kinds_[{kind, 0.0}] = state_.add_kind({.name = kind,
                                         .sizes = plan::batch_sizes(options.max_batch),
                                         .max_delay_seconds = options.max_delay_seconds,
                                         .padded = options.padded,
                                         .idempotent = true,
                                         .model = options.model,
                                         .resident_bytes = options.resident_bytes,
                                         .peak_bytes_per_item = options.bytes_per_request});
  keep_kind(kinds_.at({kind, 0.0}), kind, std::move(call));
}

JobId PoolCore::submit(std::unique_ptr<PoolCall> call, const JobOptions& options) {
  check_process("submit");
  plan::PoolJob job{.priority = options.priority,
                    .deadline_seconds = options.deadline_seconds,
                    .not_before_seconds = options.not_before_seconds,
                    .cost = options.cost,
                    .gang = options.gang,
                    .charge = options.charge,
                    .own = options.own,
                    .waits = options.wait_for_room && !Inside::any()};
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
    job.kind = kind_of(options, call->batched());
    job.need = need_of(options);
    job.tenant = tenant_of(options.tenant);
    if (job.waits && wait_for_room(lock, job.kind, job.tenant))
      job.kind = kind_of(options, call->batched());  // it may have been forgotten meanwhile
    if (closed_) throw Unavailable("submit: the pool is closed. Make a new one.");
    if (lost_) throw DeviceLost("submit: every device of the pool is lost. Make a new one, in a new process.");
    std::exception_ptr failed;
    waits_for = nullptr;
    for (const JobHandle& other : options.after) {
      if (jobs_.contains(other.id)) continue;
      if (!other.state->ended()) {
        waits_for = other.state.get();  // another thread is about to tell how it ended
      } else {
        failed = failed ? failed : other.state->error();
      }
    }
    if (waits_for != nullptr) continue;
    if (failed) {
      Ended& one = after.ended.emplace_back();
      one.call = std::move(call);
      one.error = cancelled_after(failed);
      ++ending_;
    } else {
      // Before anything is decided, since it may fail.
      if (options.deadline_seconds < kNever || options.not_before_seconds > 0.0) clock_.start(weak_from_this());
      const PoolCall* const submitted = call.get();
      const double time = now();
      plan::PoolDecisions decisions = state_.submit(time, job, id);
      const bool live =
          options.priority == Priority::interactive ||
          options.deadline_seconds < state_.options().patience[static_cast<std::size_t>(Priority::normal)];
      jobs_.emplace(id, Waiting{.call = std::move(call), .live = live, .deadline = time + options.deadline_seconds});
      if (live) ++waiting_live_;
      const auto own = std::ranges::find(decisions.ends, id, &plan::PoolEnd::job);
      const auto reason = own == decisions.ends.end() ? plan::PoolReason::none : own->reason;
      apply(std::move(decisions), after);
      for (Ended& one : after.ended) {
        if (one.call.get() != submitted) continue;
        if (reason == plan::PoolReason::no_device) one.error = no_device(options, job.kind);
        if (reason == plan::PoolReason::quota) one.error = over_quota(options, job);
      }
    }
    break;
  }
  follow(std::move(after));
  return id;
}

bool PoolCore::wait_for_room(std::unique_lock<std::mutex>& lock, std::size_t kind, std::size_t tenant) {
  const auto may_go_on = [&] { return closed_ || lost_ || state_.has_room(kind, tenant); };
  bool waited = false;
  while (!may_go_on()) {
    waited = true;
    lock.unlock();
    {
      BlockingRegion region;
      lock.lock();
      ++submitters_;
      room_.wait_for(lock, kBetweenLooksForRoom, may_go_on);
      --submitters_;
      lock.unlock();  // not held while this thread waits for the interpreter
      region.poll();
    }
    lock.lock();
  }
  return waited;
}

bool PoolCore::cancel(JobId id) {
  check_process("cancel");
  bool cancelled = false;
  After after;
  {
    const std::lock_guard lock(mutex_);
    const auto job = jobs_.find(id);
    if (job == jobs_.end()) return false;
    const auto run = runs_.find(job->second.run);
    if (run == runs_.end()) {
      apply(state_.cancel(now(), id, cancelled), after);
    } else if (!run->second.taken) {
      withdraw(run->first, id, after);
      cancelled = true;
    }
  }
  follow(std::move(after));
  return cancelled;
}

void PoolCore::set_run(Waiting& job, plan::RunId run) noexcept {
  if (job.live) waiting_live_ += (run == plan::RunId{} ? 1 : 0) - (job.run == plan::RunId{} ? 1 : 0);
  job.run = run;
}

void PoolCore::withdraw(plan::RunId id, std::optional<JobId> cancelled, After& after, const RunEnding& ending) {
  const auto found = runs_.find(id);
  if (found->second.live) --live_;
  for (const std::size_t place : found->second.devices) devices_[place].run.reset();
  for (const JobId job : found->second.jobs) set_run(jobs_.at(job), {});
  runs_.erase(found);
  apply(state_.withdraw(now(), id, cancelled), after, ending);
}

void PoolCore::vacate(std::size_t place, After& after, const RunEnding& ending) {
  std::vector<plan::RunId> begun_by_nobody;
  for (const auto& [id, run] : runs_) {
    if (!run.taken && std::ranges::count(run.devices, place) > 0) begun_by_nobody.push_back(id);
  }
  for (const plan::RunId id : begun_by_nobody) withdraw(id, {}, after, ending);
}

void PoolCore::end_waiting(const std::exception_ptr& error, After& after) {
  const RunEnding ending{.run = {}, .error = error, .report = {}};
  for (std::size_t place = 0; place < devices_.size(); ++place) {
    apply(state_.retire(now(), place), after, ending);
    vacate(place, after, ending);
  }
  std::vector<JobId> waiting;
  for (const auto& [id, job] : jobs_) {
    if (job.run == plan::RunId{}) waiting.push_back(id);
  }
  std::ranges::sort(waiting);
  for (const JobId id : waiting) {
    bool cancelled = false;
    apply(state_.cancel(now(), id, cancelled), after, ending);
  }
}

void PoolCore::close(bool cancel) noexcept {
  if (forked()) return;
  After after;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    if (cancel) {
      cancelling_ = true;
      end_waiting(std::make_exception_ptr(Cancelled(kJobOfClosedPool)), after);
    }
  }
  room_.notify_all();
  follow(std::move(after));
}

bool PoolCore::let_go() {
  const BlockingRegion region;
  std::unique_lock lock(mutex_);
  return room_.wait_for(lock, kLetGo, [this] { return let_go_ >= devices_.size(); });
}

void PoolCore::wait_for_placement() {
  const BlockingRegion region;
  std::unique_lock lock(mutex_);
  room_.wait(lock, [this] { return !placement_.asking(); });
}

std::int64_t PoolCore::waiting() const {
  check_process("waiting");
  const std::lock_guard lock(mutex_);
  return state_.waiting();
}

std::int64_t PoolCore::running() const {
  check_process("running");
  const std::lock_guard lock(mutex_);
  return state_.running();
}

double PoolCore::backlog_seconds() const {
  check_process("backlog_seconds");
  const std::lock_guard lock(mutex_);
  return state_.backlog_seconds();
}

std::string PoolCore::explain(const Pool::Counts& counts) const {
  check_process("explain");
  const std::lock_guard lock(mutex_);
  std::string text;
  for (std::size_t place = 0; place < devices_.size(); ++place) {
    const Device& device = devices_[place];
    const auto counted = counts.find(device.facts.name);
    const auto [jobs, runs, seconds] =
        counted == counts.end() ? std::tuple(device.jobs, device.runs, device.seconds) : counted->second;
    text += fmt::format("{}: {} in {}, {:.3f} s", device.facts.name, plural(jobs, "job"), plural(runs, "run"), seconds);
    if (device.lent_seconds > 0.0) text += fmt::format(", {:.3f} s of them beside steps", device.lent_seconds);
    if (!state_.active(place)) text += device.away();
    if (device.declined) text += "; " + state_.describe(*device.declined);
    text += "\n";
  }
  text += tenants_text(state_.tenants()) + placement_.explain();
  if (state_.ledger_failed()) text += "The ledger is cut off: a line could not be written. Is the disk full?\n";
  for (const plan::PoolShortage& one : state_.shortages()) text += state_.describe(one) + "\n";
  return text + fmt::format("{}, {}\n", plural(state_.waiting(), "job waits", "jobs wait"),
                            plural(state_.running(), "run goes on", "runs go on"));
}

}  // namespace paceline::internal
