// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/lanes.hpp>

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/turn.hpp>

namespace paceline {
namespace {

constexpr std::chrono::milliseconds kBetween{50};

/// A lane is free again when its micro-batch has left the first stage for the last time.
std::size_t lanes_of(const plan::Schedule& schedule) {
  const auto count = static_cast<std::size_t>(schedule.micro_batches);
  const auto in_flight = static_cast<std::size_t>(plan::in_flight(schedule, 0));
  // Forwards only: one in each stage, and one that waits, keep all stages busy.
  return in_flight > 0 ? in_flight : std::min(count, schedule.stages.size() + 1);
}

}  // namespace

/// Shared with the threads, so that one that is stuck in user code can be left behind.
struct LaneThreads::State {
  std::mutex mutex;
  std::condition_variable changed;  // for the threads
  std::condition_variable ended;    // for who waits for a job
  std::function<void(std::size_t)> job;
  std::size_t wanted = 0;  // threads that the job needs
  std::size_t active = 0;  // threads that have not left the job
  std::uint64_t jobs = 0;
  bool stop = false;
  std::vector<std::thread> threads;
  pid_t owner = getpid();

  static void work(const std::shared_ptr<State>& state, std::size_t lane) {
    pthread_setname_np(pthread_self(), ("pl lane " + std::to_string(lane)).substr(0, 15).c_str());
    std::uint64_t seen = 0;
    std::unique_lock lock(state->mutex);
    for (;;) {
      state->changed.wait(lock, [&] { return state->stop || (state->jobs != seen && lane < state->wanted); });
      if (state->stop) return;
      seen = state->jobs;
      const auto job = state->job;
      lock.unlock();
      job(lane);
      lock.lock();
      if (--state->active == 0) state->ended.notify_all();
    }
  }

  void start(const std::shared_ptr<State>& self, std::size_t count, std::function<void(std::size_t)> next) {
    const std::lock_guard lock(mutex);
    job = std::move(next);
    wanted = active = count;
    ++jobs;
    while (threads.size() < count) threads.emplace_back(work, self, threads.size());
    changed.notify_all();
  }
};

LaneThreads::LaneThreads() : state_(std::make_shared<State>()) {}

LaneThreads::~LaneThreads() { close(); }

std::size_t LaneThreads::size() const noexcept {
  const std::lock_guard lock(state_->mutex);
  return state_->threads.size();
}

void LaneThreads::close() noexcept {
  if (state_->owner != getpid()) {  // a forked child has no such threads
    new std::shared_ptr<State>(state_);
    return;
  }
  std::vector<std::thread> threads;
  bool idle = true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    threads.swap(state_->threads);
    idle = state_->active == 0;
    state_->changed.notify_all();
  }
  for (std::thread& thread : threads) {
    if (idle) {
      thread.join();
    } else {
      thread.detach();
    }
  }
}

/// Shared with the lanes.
struct Lanes::State {
  struct MicroBatch {
    TurnLoan loan;
    std::optional<StageAction> current;  // whose turn the lane has, or is about to get
    std::exception_ptr error;
    std::size_t left = 0;  // actions that it still has to take
    bool holds = false;
  };

  std::shared_ptr<LaneThreads::State> threads;
  Body body;
  std::size_t lanes = 1;
  std::deque<MicroBatch> micro_batches;
  std::atomic<bool> started{false};

  bool borrow(MicroBatch& one) {
    if (one.left == 0) return false;
    one.holds = one.loan.borrow() != nullptr;
    if (one.holds) --one.left;
    return one.holds;
  }

  static void give_back(MicroBatch& one) {
    if (!std::exchange(one.holds, false)) return;
    one.loan.give_back();
  }

  void work(std::size_t lane) {
    for (std::size_t m = lane; m < micro_batches.size(); m += lanes) {
      MicroBatch& one = micro_batches[m];
      if (!borrow(one)) return;
      try {
        body(lane, static_cast<std::int64_t>(m));
      } catch (...) {
        one.error = std::current_exception();
        give_back(one);
        return;
      }
      do {
        give_back(one);
      } while (borrow(one));
      if (one.left > 0) return;
    }
  }
};

Lanes::Lanes(LaneThreads& threads, const plan::Schedule& schedule, Body body) : state_(std::make_shared<State>()) {
  state_->threads = threads.state_;
  state_->body = std::move(body);
  state_->lanes = lanes_of(schedule);
  state_->micro_batches.resize(static_cast<std::size_t>(schedule.micro_batches));
  for (const auto& actions : schedule.stages) {
    for (const plan::Action& action : actions)
      ++state_->micro_batches[static_cast<std::size_t>(action.micro_batch)].left;
  }
}

Lanes::~Lanes() { give_up(); }

std::size_t Lanes::lanes() const noexcept { return state_->lanes; }

std::optional<StageAction> Lanes::advance(std::int64_t micro_batch) {
  State::MicroBatch& one = state_->micro_batches[static_cast<std::size_t>(micro_batch)];
  State::give_back(one);
  if (!state_->borrow(one)) return std::nullopt;
  return one.current;
}

std::optional<StageAction> Lanes::current(std::int64_t micro_batch) const {
  const State::MicroBatch& one = state_->micro_batches[static_cast<std::size_t>(micro_batch)];
  return one.holds ? one.current : std::nullopt;
}

bool Lanes::wait(const DeviceGroup::Between& between) {
  if (!state_->started.load()) return true;
  LaneThreads::State& threads = *state_->threads;
  for (;;) {
    {
      const BlockingRegion region;
      std::unique_lock lock(threads.mutex);
      if (threads.ended.wait_for(lock, kBetween, [&] { return threads.active == 0; })) return true;
    }
    if (between && !between()) return false;
  }
}

void Lanes::run(const StageAction& action, Turn& turn) {
  if (!state_->started.exchange(true)) {
    state_->threads->start(state_->threads, state_->lanes, [state = state_](std::size_t lane) { state->work(lane); });
  }
  State::MicroBatch& one = state_->micro_batches[static_cast<std::size_t>(action.micro_batch)];
  one.current = action;
  if (!turn.lend(one.loan)) throw Cancelled("pipeline: the step was given up.");
  if (one.error) std::rethrow_exception(one.error);
}

void Lanes::give_up() noexcept {
  for (State::MicroBatch& one : state_->micro_batches) one.loan.close();
}

}  // namespace paceline
