// SPDX-License-Identifier: Apache-2.0
#include "engine/pool/pool_clock.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

struct PoolClock::State {
  std::mutex mutex;
  std::condition_variable changed;
  Time next = Time::max();
  bool over = false;
  std::thread thread;
  pid_t owner = getpid();

  void work(const std::weak_ptr<PoolCore>& pool) {
    std::unique_lock lock(mutex);
    for (;;) {
      // Both may have come while the pool was called.
      const Time until = next;
      const auto changes = [&] { return over || next < until; };
      if (until == Time::max()) {
        changed.wait(lock, changes);
      } else {
        changed.wait_until(lock, until, changes);
      }
      if (over) return;
      if (next > std::chrono::steady_clock::now()) continue;
      next = Time::max();
      lock.unlock();
      if (const auto core = pool.lock()) core->tick();  // may end the pool here
      lock.lock();
    }
  }
};

PoolClock::~PoolClock() {
  if (state_ == nullptr) return;
  if (state_->owner != getpid()) {
    static_cast<void>(new std::shared_ptr<State>(std::move(state_)));
    return;
  }
  end();
  if (state_->thread.get_id() == std::this_thread::get_id()) {
    state_->thread.detach();
  } else {
    state_->thread.join();
  }
}

void PoolClock::start(std::weak_ptr<PoolCore> pool) {
  if (state_ != nullptr) return;
  auto state = std::make_shared<State>();
  try {
    state->thread = std::thread([state, pool = std::move(pool)] {
      pthread_setname_np(pthread_self(), "pl pool clock");
      state->work(pool);
    });
  } catch (const std::system_error& error) {
    throw Unavailable(
        fmt::format("submit: no thread could be started that keeps the time of jobs with a deadline or a start ({}). "
                    "Raise the limit on threads (ulimit -u, or pids.max of the cgroup).",
                    error.what()));
  }
  state_ = std::move(state);
}

void PoolClock::set(Time time) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    if (time >= state_->next) return;
    state_->next = time;
  }
  state_->changed.notify_one();
}

void PoolClock::end() noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->over = true;
  }
  state_->changed.notify_one();
}

void PoolCore::tick() noexcept {
  After after;
  {
    const std::lock_guard lock(mutex_);
    rings_at_ = kNever;
    // A worker with other work, such as that of another pool, may not come to what was decided for its device.
    std::vector<plan::RunId> late;
    double by = kNever;
    for (const Device& device : devices_) {
      if (!device.run || runs_.at(*device.run).taken) continue;
      const double begin_by = runs_.at(*device.run).begin_by;
      if (begin_by < now()) {
        late.push_back(*device.run);
      } else {
        by = std::min(by, begin_by);
      }
    }
    for (const plan::RunId run : late) withdraw(run, {}, after);
    if (const double time = now(); time >= wake_seconds_) apply(state_.tick(time), after);
    keep_time(after, by);
  }
  follow(std::move(after));
}

void PoolCore::keep_time(After& after, double by) noexcept {
  by = std::min(by, wake_seconds_);
  if (clock_.started() && by < rings_at_) after.ring = rings_at_ = by;
}

}  // namespace paceline::internal
