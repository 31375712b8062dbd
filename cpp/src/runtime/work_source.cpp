// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/work_source.hpp>

#include <algorithm>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/group_task.hpp>

#include "runtime/worker.hpp"

namespace paceline {

WorkSource::WorkSource() : signal_(std::make_shared<internal::TaskSignal>()) {}
WorkSource::~WorkSource() = default;

void WorkSource::opened(const std::vector<bool>&) {}

void WorkSource::attach(std::vector<std::weak_ptr<internal::Worker>> workers, const std::vector<bool>& asks) {
  const std::lock_guard lock(mutex_);
  if (!workers_.empty()) throw InvalidArgument("open: this source was opened before. Make a new one.");
  opened(asks);
  workers_ = std::move(workers);
}

void WorkSource::wake(DeviceId device) noexcept {
  const std::lock_guard lock(mutex_);
  if (device >= workers_.size()) return;
  if (const auto worker = workers_[device].lock()) worker->wake();
}

void WorkSource::wake_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& one : workers_) {
    if (const auto worker = one.lock()) worker->wake();
  }
}

void WorkSource::wake_caller() noexcept { signal_->wake(); }

GroupTask::GroupTask() = default;
GroupTask::~GroupTask() = default;

void GroupTask::opened(const std::vector<bool>& asks) {
  taken_.assign(asks.size(), 0);
  inside_.store(static_cast<std::size_t>(std::count(asks.begin(), asks.end(), true)), std::memory_order_release);
}

NextWork GroupTask::next(DeviceId device, Clock::time_point) noexcept {
  if (taken_[device] != 0) return NextWork::done();
  taken_[device] = 1;
  return NextWork::take(0);
}

void GroupTask::perform(DeviceId device, std::int64_t, Turn&) { run(device); }

void GroupTask::done(std::size_t, std::int64_t, const WorkTiming&) noexcept {
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) wake_caller();
}

void GroupTask::failed(DeviceId device, std::int64_t work, std::exception_ptr) noexcept { done(device, work, {}); }

void GroupTask::cancel(std::exception_ptr) noexcept {}

}  // namespace paceline
