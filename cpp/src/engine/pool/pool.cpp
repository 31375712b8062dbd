// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pool.hpp>

#include <utility>

#include "engine/pool/pool_core.hpp"

namespace paceline {
namespace internal {

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
  for (const auto& call : calls) call();
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
  call();
}

}  // namespace internal

Pool::Pool(DeviceGroup group, plan::PoolOptions options)
    : group_(group.share()), core_(std::make_shared<internal::PoolCore>(group_, std::move(options))) {
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

JobHandle Pool::submit_call(std::unique_ptr<internal::PoolCall> call, std::shared_ptr<const internal::JobState> state,
                            const JobOptions& options) {
  const JobId id = core_->submit(std::move(call), options);
  return {id, std::move(state), core_};
}

bool Pool::cancel(const JobHandle& job) {
  const auto core = job.pool.lock();
  return core != nullptr && core->cancel(job.id);
}

void Pool::add_batches(const std::string& kind, const BatchOptions& options, BatchCall call) {
  core_->add_batches(kind, options, std::move(call));
}

}  // namespace paceline
