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

void WorkSource::opened(std::span<const DeviceId>) {}

void WorkSource::attach(Workers workers, std::span<const DeviceId> devices) {
  const std::lock_guard lock(mutex_);
  if (!workers_.empty()) throw InvalidArgument("open: this source was opened before. Make a new one.");
  opened(devices);
  workers_ = std::move(workers);
}

void WorkSource::replace(DeviceId device, const std::shared_ptr<internal::Worker>& worker) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [id, one] : workers_) {
    if (id == device) one = worker;
  }
}

bool WorkSource::begin() noexcept {
  Progress progress = Progress::waiting;
  return progress_.compare_exchange_strong(progress, Progress::begun) || progress == Progress::begun;
}

void WorkSource::withdraw(std::exception_ptr reason) noexcept {
  Progress progress = Progress::waiting;
  if (!progress_.compare_exchange_strong(progress, Progress::withdrawn)) return;
  cancel(std::move(reason));
  progress_ = Progress::over;
  wake_caller();
}

void WorkSource::wake(DeviceId device) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, one] : workers_) {
    if (id != device) continue;
    if (const auto worker = one.lock()) worker->wake();
  }
}

void WorkSource::wake_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, one] : workers_) {
    if (const auto worker = one.lock()) worker->wake();
  }
}

void WorkSource::wake_caller() noexcept { signal_->wake(); }

GroupTask::GroupTask() = default;
GroupTask::~GroupTask() = default;

void GroupTask::opened(std::span<const DeviceId> devices) {
  taken_.clear();
  for (const DeviceId device : devices) taken_.emplace_back(device, false);
  inside_.store(devices.size(), std::memory_order_release);
}

NextWork GroupTask::next(DeviceId device, Clock::time_point) noexcept {
  const auto own = std::ranges::find(taken_, device, &std::pair<DeviceId, bool>::first);
  if (own == taken_.end() || own->second) return NextWork::done();
  own->second = true;
  return NextWork::take(0);
}

void GroupTask::perform(DeviceId device, std::int64_t, Turn&) { run(device); }

void GroupTask::done(DeviceId, std::int64_t, const WorkTiming&) noexcept {
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) wake_caller();
}

void GroupTask::failed(DeviceId device, std::int64_t work, std::exception_ptr) noexcept { done(device, work, {}); }

void GroupTask::cancel(std::exception_ptr) noexcept {}

}  // namespace paceline
