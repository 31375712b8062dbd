// SPDX-License-Identifier: Apache-2.0
#include "runtime/worker.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

namespace paceline::internal {
namespace {

constexpr int kSpins = 100;  // a few microseconds: devices often finish that close together
constexpr std::chrono::microseconds kShortestPause{5};
constexpr std::chrono::microseconds kLongestPause{100};

}  // namespace

void TaskSignal::wake() noexcept {
  // Taking the lock orders this wake-up behind a waiter that has just seen "not done" and is about to sleep.
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

Worker::Worker(Device device, std::size_t index, bool own_cores)
    : device_(std::move(device)), index_(index), own_cores_(own_cores) {}

void Worker::start() {
  thread_ = std::thread([self = shared_from_this()] {
    self->work();
    self->exited_.store(true);
  });
}

template <class Change>
void Worker::call(Change change) {
  {
    const std::lock_guard lock(mutex_);
    change();
    calls_.fetch_add(1, std::memory_order_release);
  }
  changed_.notify_one();
}

void Worker::open(std::list<Open> source, int callers_core) noexcept {
  call([&] {
    arrived_.splice(arrived_.end(), source);
    callers_core_.store(callers_core, std::memory_order_relaxed);
  });
}

void Worker::wake() noexcept {
  call([] {});
}

void Worker::stop() noexcept {
  call([this] { stopped_ = true; });
}

void Worker::work() {
  backend_of(device_).prepare_worker(device_);
  pthread_setname_np(pthread_self(), fmt::format("pl {}", device_.name).substr(0, 15).c_str());
  ready_.store(true);
  for (;;) {
    const std::uint64_t seen = calls_.load(std::memory_order_acquire);
    const bool stopped = take_arrivals();
    if (ask()) continue;
    if (stopped && open_.empty()) return;
    sleep(seen);
  }
}

bool Worker::take_arrivals() {
  const std::lock_guard lock(mutex_);
  while (!arrived_.empty()) {
    const int priority = arrived_.front().priority;
    const auto at = std::ranges::find_if(open_, [&](const Open& other) { return priority > other.priority; });
    open_.splice(at, arrived_, arrived_.begin());
  }
  return stopped_;
}

bool Worker::ask() {
  awaits_events_ = false;
  until_ = Clock::time_point::max();
  for (auto one = open_.begin(); one != open_.end();) {
    const NextWork next = one->source->next(index_, Clock::now());
    if (next.kind == NextWork::Kind::take) {
      perform(*one->source, next.work);
      return true;
    }
    if (next.kind == NextWork::Kind::done) {
      one = open_.erase(one);
      continue;
    }
    one->awaited = next.event;
    awaits_events_ |= next.event != nullptr;
    until_ = std::min(until_, next.until);
    ++one;
  }
  return false;
}

void Worker::perform(WorkSource& source, std::int64_t number) {
  Turn turn(device_);
  WorkTiming timing{.start = Clock::now(), .finish = {}};
  try {
    source.perform(index_, number, turn);
  } catch (...) {
    source.failed(index_, number, std::current_exception());
    return;
  }
  timing.finish = Clock::now();
  source.done(index_, number, timing);
}

/// An event that throws counts as done: its source checks it too, and gets the error.
bool Worker::due() const noexcept {
  const auto is_done = [](const Open& one) {
    try {
      return one.awaited != nullptr && one.awaited->done();
    } catch (...) {
      return true;
    }
  };
  return std::ranges::any_of(open_, is_done) || (until_ != Clock::time_point::max() && Clock::now() >= until_);
}

void Worker::sleep(std::uint64_t seen) {
  const auto called = [&] { return called_since(seen); };
  if (open_.empty()) {
    const bool callers = callers_core_.load(std::memory_order_relaxed) == sched_getcpu();
    idle_wait_.until(own_cores_ && !callers, called, [&] {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, called);
      return true;
    });
    return;
  }
  for (int i = 0; i < kSpins && !called(); ++i) relax();
  if (!awaits_events_) {
    std::unique_lock lock(mutex_);
    if (until_ == Clock::time_point::max()) {
      changed_.wait(lock, called);
    } else {
      changed_.wait_until(lock, until_, called);
    }
    return;
  }
  // Polls, because an event wakes nobody. Spins at first, because a sleeping thread would be late for an event that is
  // due within microseconds.
  const Clock::time_point begin = Clock::now();
  while (Clock::now() - begin < ShortWait::kSpin) {
    if (called() || due()) return;
    relax();
  }
  for (auto pause = kShortestPause; !called() && !due(); pause = std::min(2 * pause, kLongestPause)) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, pause, called);
  }
}

}  // namespace paceline::internal
