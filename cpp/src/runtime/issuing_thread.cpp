// SPDX-License-Identifier: Apache-2.0
#include "runtime/issuing_thread.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/deadline.hpp"
#include "runtime/polled_wait.hpp"

namespace paceline::internal {

/// The thread shares it, so a thread that was given up still finds it.
struct IssuingThread::State {
  using Clock = std::chrono::steady_clock;

  std::mutex mutex;
  std::condition_variable changed;
  std::thread thread;
  Job job;
  LookAfter look_after;
  Clock::time_point deadline;  // of the job that run() gave
  std::exception_ptr error;
  bool idle = true;  // the last job is done
  bool stop = false;
  bool exited = false;
  bool given_up = false;
  pid_t owner = getpid();

  [[nodiscard]] bool forked() const { return getpid() != owner; }
  [[nodiscard]] bool left_behind() {
    const std::lock_guard lock(mutex);
    return given_up;
  }

  /// Requires the lock.
  void give(Job next) {
    job = std::move(next);
    idle = false;
    changed.notify_all();
  }

  void work(const Enter& enter, std::chrono::nanoseconds interval) {
    std::shared_ptr<void> held;
    try {
      if (enter != nullptr) held = enter();
    } catch (const Error&) {  // the first job meets the same error and can report it
    }
    bool busy = false;
    Clock::time_point next_look;
    std::unique_lock lock(mutex);
    while (!given_up) {
      const auto wanted = [&] { return job != nullptr || stop || given_up; };
      const bool woken = busy ? changed.wait_until(lock, next_look, wanted) : (changed.wait(lock, wanted), true);
      if (given_up || (woken && job == nullptr)) break;
      Job current = std::exchange(job, nullptr);
      const bool only_looks = current == nullptr;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        if (current != nullptr) current();
      } catch (...) {
        thrown = std::current_exception();
      }
      current = nullptr;  // without the lock: it may own whoever owns this thread
      // Does not look after every job, because each look calls the driver and healthy work needs no look.
      if (!busy) next_look = Clock::now() + interval;
      busy = look_after != nullptr;
      if (busy && Clock::now() >= next_look && !left_behind()) {
        busy = look_after();
        next_look = Clock::now() + interval;
      }
      lock.lock();
      if (only_looks) continue;
      error = std::move(thrown);
      idle = job == nullptr;  // start() may have given the next one
      changed.notify_all();
    }
    // Destroys here what they own, because the caller may be gone. Without the lock, as above.
    Job never_begun = std::exchange(job, nullptr);
    lock.unlock();
    never_begun = nullptr;
    look_after = nullptr;
    lock.lock();
    exited = true;
    changed.notify_all();
  }
};

IssuingThread::IssuingThread(const std::string& name, Enter enter, LookAfter look_after,
                             std::chrono::nanoseconds interval)
    : state_(std::make_shared<State>()) {
  state_->look_after = std::move(look_after);
  try {
    state_->thread = std::thread([state = state_, enter = std::move(enter), interval, name] {
      pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
      state->work(enter, interval);
    });
  } catch (const std::system_error& error) {
    throw Unavailable(
        fmt::format("GPUs: no thread could be started that gives them work ('{}': {}). Raise the limit on threads "
                    "(ulimit -u, or pids.max of the cgroup).",
                    name, error.what()));
  }
}

IssuingThread::~IssuingThread() {
  if (state_->forked()) {
    static_cast<void>(new std::shared_ptr<State>(state_));  // kept for good: this process does not have the thread
    return;
  }
  const std::lock_guard lock(state_->mutex);
  if (!state_->thread.joinable()) return;  // it has ended, or will end by itself
  state_->given_up = true;
  state_->changed.notify_all();
  state_->thread.detach();
}

bool IssuingThread::run(Job job, std::chrono::nanoseconds timeout, Interrupt interrupt) {
  timeout = bounded(timeout);
  BlockingRegion region;
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const auto await = [&](std::chrono::nanoseconds limit) {
    const auto idle = [&] { return state.idle; };
    const bool back = interrupt == Interrupt::yes ? wait_polled(region, state.changed, lock, limit, idle)
                                                  : state.changed.wait_for(lock, limit, idle);
    if (!back) state.given_up = true;
    return back;
  };
  if (!state.idle && !await(state.deadline - State::Clock::now())) return false;
  state.deadline = State::Clock::now() + timeout;
  state.error = nullptr;
  state.give(std::move(job));
  if (!await(timeout)) return false;
  if (state.error != nullptr) std::rethrow_exception(std::exchange(state.error, nullptr));
  return true;
}

void IssuingThread::start(Job job) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->given_up) state_->give(std::move(job));  // otherwise it ends with this call, without the lock
}

bool IssuingThread::wait(std::chrono::nanoseconds timeout, Interrupt interrupt) {
  State& state = *state_;
  if (state.forked()) return true;
  timeout = bounded(timeout);
  BlockingRegion region;
  std::unique_lock lock(state.mutex);
  const auto over = [&] { return state.idle || state.given_up; };
  const bool back = interrupt == Interrupt::yes ? wait_polled(region, state.changed, lock, timeout, over)
                                                : state.changed.wait_for(lock, timeout, over);
  if (!back) state.given_up = true;
  return !state.given_up;
}

bool IssuingThread::given_up() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->given_up;
}

bool IssuingThread::close(std::chrono::nanoseconds timeout) {
  if (state_->forked()) return true;
  const BlockingRegion region;
  std::unique_lock lock(state_->mutex);
  if (!state_->thread.joinable() || state_->given_up) return !state_->given_up;
  state_->stop = true;
  state_->changed.notify_all();
  if (!state_->changed.wait_for(lock, bounded(timeout), [&] { return state_->exited; })) {
    state_->given_up = true;
    return false;
  }
  lock.unlock();
  state_->thread.join();
  return true;
}

void IssuingThread::leave(Job last) noexcept {
  const std::lock_guard lock(state_->mutex);
  if (state_->given_up || !state_->thread.joinable()) return;
  state_->job = std::move(last);  // replaces a job that has not begun
  state_->stop = true;
  state_->changed.notify_all();
  state_->thread.detach();
}

}  // namespace paceline::internal
