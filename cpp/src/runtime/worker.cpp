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

const Device*& device_of_this_thread() noexcept {
  thread_local const Device* device = nullptr;
  return device;
}

BesideGang& beside_gang_of_this_thread() noexcept {
  thread_local BesideGang beside = BesideGang::none;
  return beside;
}

LentTime& lent_time_of_this_thread() noexcept {
  thread_local LentTime lent;
  return lent;
}

Worker::Worker(Device device) : device_(std::move(device)) {}

void Worker::start() {
  thread_ = std::thread([self = shared_from_this()] {
    self->work();
    self->exited_.store(true);
  });
  id_ = thread_.get_id();
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

void Worker::open(std::list<Open> sources, int callers_core) noexcept {
  call([&] {
    arrived_.splice(arrived_.end(), sources);
    callers_core_.store(callers_core, std::memory_order_relaxed);
  });
}

bool Worker::inside(std::uint64_t group) noexcept {
  const std::lock_guard lock(mutex_);
  return !handed_over() && std::ranges::find(open_, group, &Open::group) != open_.end();
}

bool Worker::needed_by(std::uint64_t group) noexcept {
  const std::lock_guard lock(mutex_);
  return (!handed_over() && std::ranges::find(open_, group, &Open::group) != open_.end()) ||
         std::ranges::any_of(arrived_, [&](const Open& one) { return one.group == group && !one.source->over(); });
}

bool Worker::hand_over(const WorkSource& source, std::list<Open>& begun) {
  const std::lock_guard lock(mutex_);
  std::list<Open> copies(open_.size());  // before, since it may throw; the thread changes the size under the mutex only
  const void* expected = &source;
  if (!inside_.compare_exchange_strong(expected, this)) return false;
  // From here on the thread leaves the list alone until it gets the mutex.
  for (auto one = open_.begin(); Open& copy : copies) {
    copy = *one++;
    copy.awaited = nullptr;
  }
  begun = std::move(copies);
  return true;
}

std::list<Worker::Open> Worker::take_waiting() noexcept {
  std::list<Open> waiting;
  const std::lock_guard lock(mutex_);
  waiting.swap(arrived_);
  return waiting;
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
  std::list<Open> withdrawn;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  bool gang = std::ranges::any_of(open_, &Open::gang);
  for (auto next = arrived_.begin(); next != arrived_.end();) {
    const auto one = next++;
    if (one->gang && gang) continue;
    if (!one->source->begin()) {
      withdrawn.splice(withdrawn.end(), arrived_, one);
      continue;
    }
    gang |= one->gang;
    const auto at = std::ranges::find_if(open_, [&](const Open& other) { return one->priority > other.priority; });
    open_.splice(at, arrived_, one);
  }
  return stopped_ && arrived_.empty();
}

/// The source ends before it is off the list, since who waits for that may free what the source uses.
std::list<Worker::Open>::iterator Worker::let_go(std::list<Open>::iterator one) {
  one->source.reset();
  const std::lock_guard lock(mutex_);
  return open_.erase(one);
}

bool Worker::ask() {
  awaits_events_ = false;
  until_ = Clock::time_point::max();
  BesideGang& beside = beside_gang_of_this_thread();
  if (std::ranges::none_of(open_, &Open::gang)) {
    beside = BesideGang::none;
  } else if (beside == BesideGang::none) {
    beside = BesideGang::works;
  }
  for (auto one = open_.begin(); one != open_.end();) {
    const NextWork next = one->source->next(one->device, Clock::now());
    if (one->gang) beside = next.kind == NextWork::Kind::wait ? BesideGang::waits : BesideGang::works;
    if (next.kind == NextWork::Kind::take) {
      if (perform(*one, next.work)) {
        give_turn(one);
        return true;
      }
      std::list<Open> others;  // destroyed without the lock
      const std::lock_guard lock(mutex_);
      others.swap(open_);
      return true;
    }
    if (next.kind == NextWork::Kind::done) {
      const bool gang = one->gang;
      one = let_go(one);
      if (gang) return true;  // the next gang comes before what fills gaps
      continue;
    }
    one->awaited = next.event;
    awaits_events_ |= next.event != nullptr;
    until_ = std::min(until_, next.until);
    ++one;
  }
  return false;
}

/// Those of its priority come before it now. A gang keeps its place, since its other devices wait for this one. So does
/// a source that is complete: whoever closes its group waits until this worker lets go of it.
void Worker::give_turn(std::list<Open>::iterator one) {
  const auto next = std::next(one);
  const auto end =
      std::find_if(next, open_.end(), [&](const Open& other) { return other.gang || other.priority != one->priority; });
  if (one->gang || next == end || one->source->complete()) return;
  const std::lock_guard lock(mutex_);
  open_.splice(end, open_, one);
}

/// Each claim rounds, and flushes small numbers, like the thread that has opened its source. What a claim of another
/// group did to where the thread runs, or to its current device, is undone. Within a group it is not, which saves a
/// system call for each claim.
bool Worker::perform(const Open& open, std::int64_t number) {
  WorkSource& source = *open.source;
  if (std::exchange(last_, open.group) != open.group) backend_of(device_).prepare_worker(device_);
  std::fesetenv(&open.rounding);
  device_of_this_thread() = &device_;
  Turn turn(device_);
  inside_.store(&source);
  const auto stays = [&] {
    const void* expected = &source;
    return inside_.compare_exchange_strong(expected, nullptr);
  };
  const bool lends = !open.gang && beside_gang_of_this_thread() == BesideGang::works && source.part() > 0.0;
  WorkTiming timing{.start = Clock::now(), .finish = {}};
  try {
    source.perform(open.device, number, turn);
  } catch (...) {
    device_of_this_thread() = nullptr;
    if (lends) count_lent(timing.start);
    source.failed(open.device, number, std::current_exception());
    return stays();
  }
  timing.finish = Clock::now();
  device_of_this_thread() = nullptr;
  if (lends) count_lent(timing.start);
  source.done(open.device, number, timing);
  return stays();
}

void Worker::count_lent(Clock::time_point start) noexcept {
  LentTime& lent = lent_time_of_this_thread();
  lent.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  lent.most = 0.0;
  for (const Open& one : open_) lent.most += one.gang ? 0.0 : one.source->part();
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
    idle_wait_.until(own_cores_.load(std::memory_order_relaxed) && !callers, called, [&] {
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
