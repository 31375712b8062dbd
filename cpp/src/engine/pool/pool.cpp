// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pool.hpp>

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <paceline/runtime/blocking.hpp>

#include "engine/pool/added_device.hpp"
#include "engine/pool/pool_core.hpp"

namespace paceline {
namespace internal {
namespace {

constexpr std::chrono::milliseconds kBetweenLooksAtJob{50};

void call_and_drop_errors(const std::function<void()>& call) noexcept {
  try {
    call();
  } catch (...) {  // nobody waits for it
  }
}

}  // namespace

PoolCall::~PoolCall() = default;

void JobState::end(const JobReport& report, std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    report_ = report;
    error_ = std::move(error);
    ended_ = true;
  }
  changed_.notify_all();
}

void JobState::call_back() noexcept {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(mutex_);
    called_back_ = true;
    calls.swap(then_);
  }
  for (const auto& call : calls) call_and_drop_errors(call);
}

void JobState::wait() const {
  if (ended()) return;
  BlockingRegion region;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, kBetweenLooksAtJob, [this] { return ended_; })) return;
    }
    region.poll();
  }
}

bool JobState::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void JobState::when_ended(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (!called_back_) {
      then_.push_back(std::move(call));
      return;
    }
  }
  call_and_drop_errors(call);
}

}  // namespace internal

/// Those of devices that came later, one each.
struct internal::AddedGroups {
  std::mutex mutex;
  std::vector<DeviceGroup> groups;
};

namespace {

/// Ends the group, which would leave a worker behind that has other work for longer than ten seconds. Such a worker
/// lets go of the pool later, and the last one ends the group.
void leave(DeviceGroup& group, internal::PoolCore& core) {
  if (!group.closed() && core.let_go()) group.close();
}

void leave(DeviceGroup& group, internal::AddedGroups& added, internal::PoolCore& core) {
  leave(group, core);
  std::vector<DeviceGroup> groups;
  {
    const std::lock_guard lock(added.mutex);
    groups = added.groups;
  }
  for (DeviceGroup& one : groups) leave(one, core);
}

/// Work of a trainer's steps comes first, after each job, but for those that the budget allows.
constexpr int kBesideSteps = -1;
constexpr int kBeforeSteps = 1;

double checked(double budget) {
  if (!(budget >= 0.0 && budget <= 1.0)) {
    throw InvalidArgument(
        fmt::format("Pool: budget is {}; it must be a part of a device's time, from 0 to 1.", budget));
  }
  return budget;
}

std::shared_ptr<internal::AddedDevice> open_live(const std::shared_ptr<internal::PoolCore>& core, DeviceGroup group,
                                                 DeviceId id) {
  auto live = std::make_shared<internal::AddedDevice>(core, group, true);
  group.open(live, {.priority = kBeforeSteps}, std::span(&id, 1));
  return live;
}

}  // namespace

Pool::Pool(DeviceGroup group, plan::PoolOptions options, double budget,
           const std::map<std::string, double>& memory_bytes)
    : group_(group.share()),
      core_(std::make_shared<internal::PoolCore>(group_, std::move(options), checked(budget), memory_bytes)),
      added_(std::make_shared<internal::AddedGroups>()) {
  group_.open(core_, {.priority = kBesideSteps});
  for (const DeviceId id : group_.ids()) open_live(core_, group_, id)->seat(group_.place(id));
}

void Pool::add(const Device& device, double memory_bytes) {
  const auto core = core_;
  core->check_new(device.name, memory_bytes);
  auto queue = internal::JobQueue::of(device);
  DeviceGroup group({device});
  const auto source = std::make_shared<internal::AddedDevice>(core, group, false);
  group.open(source, {.priority = kBesideSteps});
  const auto live = open_live(core, group, group.ids().front());
  {
    const std::lock_guard lock(added_->mutex);
    added_->groups.push_back(group);
  }
  try {
    core->add(device, memory_bytes, std::move(queue), source, *live);
  } catch (...) {
    group.close();
    throw;
  }
}

Stream* Pool::stream(const std::string& device) const { return core_->stream(device); }
void Pool::release() noexcept { core_->release(); }

Pool::~Pool() {
  try {
    if (core_->forked()) return;
    core_->close(true);
    if (!internal::Inside::of(*core_)) group_.wait(*core_);  // what runs may use what is destroyed after the pool
    if (waits_for_placement_ && !internal::Inside::of(*core_)) core_->wait_for_placement();
    if (!internal::Inside::any()) leave(group_, *added_, *core_);
  } catch (...) {  // nothing that a destructor could tell
  }
}

// The core is kept, since a call of then() may destroy the pool.
void Pool::retire(const std::string& device) { std::shared_ptr(core_)->retire(device, true); }
bool Pool::retire_unless_last(const std::string& device, bool released, double activation_seconds) {
  return std::shared_ptr(core_)->retire(device, true, true, released, activation_seconds);
}
void Pool::on_wants_devices(std::function<void()> call, double wait_seconds) {
  core_->on_wants_devices(std::move(call), wait_seconds);
}
void Pool::restore(const std::string& device) { std::shared_ptr(core_)->retire(device, false); }

void Pool::close(bool cancel) {
  internal::check_may_wait(core_);
  const auto core = core_;
  const auto added = added_;
  DeviceGroup group = group_;
  core->close(cancel);
  {
    BlockingRegion region;
    group.wait(*core, [&] {
      region.poll();
      return true;
    });
  }
  leave(group, *added, *core);
}

std::int64_t Pool::waiting() const { return core_->waiting(); }
std::int64_t Pool::running() const { return core_->running(); }
std::vector<std::string> Pool::active() const { return core_->active(); }
double Pool::backlog_seconds() const { return core_->backlog_seconds(); }
std::optional<PoolTick> Pool::scale_tick(double least_seconds, double keep_seconds) {
  return core_->scale_tick(least_seconds, keep_seconds);
}
std::string Pool::explain(const Counts& counts) const { return core_->explain(counts); }
void Pool::write_ledger(const std::filesystem::path& path) { core_->write_ledger(path); }

JobHandle Pool::submit_call(std::unique_ptr<internal::PoolCall> call, std::shared_ptr<const internal::JobState> state,
                            const JobOptions& options) {
  return submit_to(core_, std::move(call), std::move(state), options);
}

JobHandle Pool::submit_to(const std::weak_ptr<internal::PoolCore>& pool, std::unique_ptr<internal::PoolCall> call,
                          std::shared_ptr<const internal::JobState> state, const JobOptions& options) {
  const auto core = pool.lock();
  if (core == nullptr) throw Unavailable("submit: the pool is gone. Make a new one.");
  const JobId id = core->submit(std::move(call), options);
  return {id, std::move(state), core};
}

bool Pool::cancel(const JobHandle& job) {
  const auto core = job.pool.lock();
  return core != nullptr && core->cancel(job.id);
}

void Pool::visit_runs_over(double seconds, const Visit& visit) const { core_->visit_runs_over(seconds, visit); }
void Pool::add_tenant(plan::PoolTenant tenant) { core_->add_tenant(std::move(tenant)); }
std::vector<plan::PoolTenantUse> Pool::tenants() const { return core_->tenants(); }
bool Pool::forget(const std::string& kind) { return core_->forget(kind); }
bool Pool::unload(const std::string& device, const std::string& model) { return core_->unload(device, model); }
bool Pool::give_up(plan::RunId run, const std::exception_ptr& error) {
  return std::shared_ptr(core_)->give_up(run, error);
}

void Pool::add_batches(const std::string& kind, const BatchOptions& options, BatchCall call) {
  core_->add_batches(kind, options, std::move(call));
}

}  // namespace paceline
