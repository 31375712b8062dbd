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
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/turn.hpp>

#include "engine/pipeline/slots.hpp"

namespace paceline {
namespace {

constexpr std::chrono::milliseconds kBetween{50};

}  // namespace

/// Shared with the threads, so that one that is stuck in user code can be left behind.
struct LaneThreads::State {
  struct Job {
    std::function<void(std::size_t)> run;
    std::size_t left = 0;  // lanes that have not left it
  };

  std::mutex mutex;
  std::condition_variable changed;                     // for the threads
  std::condition_variable ended;                       // for who waits for a job
  std::vector<std::deque<std::shared_ptr<Job>>> jobs;  // of each thread, in order
  std::vector<std::thread> threads;
  std::size_t busy = 0;  // threads that have not let go of a job
  bool stop = false;
  pid_t owner = getpid();
  std::shared_ptr<State> itself;  // in a forked child

  static void work(const std::shared_ptr<State>& state, std::size_t lane) {
    pthread_setname_np(pthread_self(), ("pl lane " + std::to_string(lane)).substr(0, 15).c_str());
    std::unique_lock lock(state->mutex);
    for (;;) {
      state->changed.wait(lock, [&] { return state->stop || !state->jobs[lane].empty(); });
      if (state->stop) return;
      std::shared_ptr<Job> job = std::move(state->jobs[lane].front());
      state->jobs[lane].pop_front();
      ++state->busy;
      lock.unlock();
      job->run(lane);
      lock.lock();
      if (--job->left == 0) state->ended.notify_all();
      lock.unlock();
      job.reset();  // it may destroy what belongs to the user, even the LaneThreads
      lock.lock();
      --state->busy;
    }
  }

  std::shared_ptr<Job> start(const std::shared_ptr<State>& self, std::size_t count,
                             std::function<void(std::size_t)> run) {
    const std::lock_guard lock(mutex);
    if (stop) throw Unavailable("pipeline: the threads of its lanes were closed. Make new ones.");
    if (jobs.size() < count) jobs.resize(count);
    try {
      while (threads.size() < count) threads.emplace_back(work, self, threads.size());
    } catch (const std::system_error& error) {
      throw Unavailable("pipeline: no thread could be started for a micro-batch in flight (" +
                        std::string(error.what()) + "). Raise the limit on threads (ulimit -u, or pids.max of the " +
                        "cgroup), or let fewer micro-batches be in flight.");
    }
    auto job = std::make_shared<Job>(Job{std::move(run), count});
    for (std::size_t lane = 0; lane < count; ++lane) jobs[lane].push_back(job);
    changed.notify_all();
    return job;
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
    state_->itself = state_;        // which is never destroyed
    return;
  }
  std::vector<std::thread> threads;
  std::vector<std::deque<std::shared_ptr<State::Job>>> jobs;  // destroyed without the lock
  bool idle = true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    threads.swap(state_->threads);
    state_->jobs.swap(jobs);
    idle = state_->busy == 0;
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

  std::shared_ptr<State> itself;  // in a forked child
  std::shared_ptr<LaneThreads::State> threads;
  std::weak_ptr<LaneThreads::State::Job> job;  // the job owns this state
  Body body;
  std::vector<std::vector<std::size_t>> lanes;  // the micro-batches of each lane, in order
  std::deque<MicroBatch> micro_batches;
  std::atomic<bool> started{false};

  MicroBatch& at(std::int64_t micro_batch) {
    const auto m = static_cast<std::size_t>(micro_batch);
    if (m < micro_batches.size()) return micro_batches[m];
    throw InvalidArgument("lanes: there is no micro-batch " + std::to_string(micro_batch) + " among " +
                          std::to_string(micro_batches.size()) + ".");
  }

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
    for (const std::size_t m : lanes[lane]) {
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
  plan::check(schedule);
  state_->threads = threads.state_;
  state_->body = std::move(body);
  state_->micro_batches.resize(static_cast<std::size_t>(schedule.micro_batches));
  bool forward_only = true;
  for (const auto& actions : schedule.stages) {
    for (const plan::Action& action : actions) {
      forward_only = forward_only && action.kind == plan::Action::Kind::forward;
      ++state_->at(action.micro_batch).left;
    }
  }
  const internal::Slots slots = internal::slots_of(schedule, 0);
  // Forwards only: one micro-batch in each stage, and one that waits, keep all stages busy.
  const std::size_t most = schedule.stages.size() + 1;
  state_->lanes.resize(forward_only ? std::min(state_->micro_batches.size(), most) : slots.count);
  std::size_t next = 0;
  for (const plan::Action& action : schedule.stages.front()) {
    if (action.kind != plan::Action::Kind::forward) continue;
    const auto m = static_cast<std::size_t>(action.micro_batch);
    state_->lanes[forward_only ? next++ % state_->lanes.size() : slots.of[m]].push_back(m);
  }
}

Lanes::~Lanes() {
  if (state_->threads->owner != getpid()) {  // a forked child: its copies of locks may be taken by nobody
    state_->itself = state_;                 // which is never destroyed
    return;
  }
  give_up();
}

std::size_t Lanes::lanes() const noexcept { return state_->lanes.size(); }

std::optional<StageAction> Lanes::advance(std::int64_t micro_batch) {
  State::MicroBatch& one = state_->at(micro_batch);
  State::give_back(one);
  if (!state_->borrow(one)) return std::nullopt;
  return one.current;
}

std::optional<StageAction> Lanes::current(std::int64_t micro_batch) const {
  const State::MicroBatch& one = state_->at(micro_batch);
  return one.holds ? one.current : std::nullopt;
}

bool Lanes::wait(const DeviceGroup::Between& between) {
  const std::shared_ptr<LaneThreads::State::Job> job = state_->job.lock();
  if (job == nullptr) return true;  // not begun, or all lanes have let go of it
  LaneThreads::State& threads = *state_->threads;
  for (;;) {
    {
      const BlockingRegion region;
      std::unique_lock lock(threads.mutex);
      if (threads.ended.wait_for(lock, kBetween, [&] { return job->left == 0; })) return true;
    }
    if (between && !between()) return false;
  }
}

void Lanes::run(const StageAction& action, Turn& turn) {
  if (!state_->started.exchange(true)) {
    state_->job = state_->threads->start(state_->threads, state_->lanes.size(),
                                         [state = state_](std::size_t lane) { state->work(lane); });
  }
  State::MicroBatch& one = state_->at(action.micro_batch);
  if (one.left == 0) {
    throw InvalidArgument(
        "lanes: micro-batch " + std::to_string(action.micro_batch) +
        " has run all of its actions. Lanes are for one step, of the schedule that they were made with.");
  }
  one.current = action;
  if (!turn.lend(one.loan)) throw Cancelled("pipeline: the step was given up.");
  if (one.error) std::rethrow_exception(one.error);
}

void Lanes::give_up() noexcept {
  for (State::MicroBatch& one : state_->micro_batches) one.loan.close();
}

}  // namespace paceline
