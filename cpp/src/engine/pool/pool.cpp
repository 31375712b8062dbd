// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pool.hpp>

#include <utility>

#include "engine/pool/pool_core.hpp"

namespace paceline {
namespace internal {
namespace {

void call_and_drop_errors(const std::function<void()>& call) noexcept {
  try {
    call();
  } catch (...) {  // nobody waits for it
  }
}

}  // namespace

PoolCall::~PoolCall() = default;

void JobState::end(const JobReport& report, std::exception_ptr error) noexcept {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(mutex_);
    report_ = report;
    error_ = std::move(error);
    ended_ = true;
    calls.swap(then_);
  }
  changed_.notify_all();
  for (const auto& call : calls) call_and_drop_errors(call);
}

void JobState::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ended_; });
}

bool JobState::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void JobState::when_ended(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) {
      then_.push_back(std::move(call));
      return;
    }
  }
  call_and_drop_errors(call);
}

}  // namespace internal

Pool::Pool(DeviceGroup group, plan::PoolOptions options)
    : group_(group.share()), core_(std::make_shared<internal::PoolCore>(group_, std::move(options))) {
  if (group_.asynchronous()) {
    throw Unavailable("Pool: the group has a GPU, on which pools do not run yet. Make it of host devices.");
  }
  // Work of a trainer's steps comes first, after each job.
  group_.open(core_, {.priority = -1});
}

Pool::~Pool() {
  try {
    close(true);
  } catch (...) {  // nothing that a destructor could tell
  }
}

void Pool::retire(const std::string& device) { core_->retire(device, true); }
void Pool::restore(const std::string& device) { core_->retire(device, false); }

void Pool::close(bool cancel) {
  core_->close(cancel);
  group_.wait(*core_);
  group_.close();
}

std::int64_t Pool::waiting() const { return core_->waiting(); }
std::int64_t Pool::running() const { return core_->running(); }
std::string Pool::explain() const { return core_->explain(); }

JobId Pool::submit_call(const std::shared_ptr<internal::PoolCore>& core, std::unique_ptr<internal::PoolCall> call,
                        JobOptions options) {
  return core->submit(std::move(call), options);
}

bool Pool::cancel_job(internal::PoolCore& core, JobId id) { return core.cancel(id); }

void Pool::add_batches(const std::string& kind, const BatchOptions& options, BatchCall call) {
  core_->add_batches(kind, options, std::move(call));
}

}  // namespace paceline
