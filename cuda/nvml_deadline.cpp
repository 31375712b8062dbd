// SPDX-License-Identifier: Apache-2.0
#include "nvml_deadline.hpp"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <paceline/runtime/blocking.hpp>

#include "polled_wait.hpp"

namespace paceline::cuda {

struct NvmlDeadline::State {
  mutable std::mutex mutex;
  std::condition_variable returned;
  std::chrono::nanoseconds limit{};
  int away = 0;  // jobs that were given up
};

namespace {

struct Outcome {
  bool done = false;
  bool given_up = false;
};

}  // namespace

NvmlDeadline& NvmlDeadline::of_process() {
  static auto* const deadline = new NvmlDeadline(std::chrono::seconds(10));  // kept for ever, as the library is
  return *deadline;
}

NvmlDeadline::NvmlDeadline(std::chrono::nanoseconds limit) : state_(std::make_shared<State>()) {
  state_->limit = limit;
}

void NvmlDeadline::set_limit(std::chrono::nanoseconds limit) {
  const std::lock_guard lock(state_->mutex);
  state_->limit = limit;
}

std::chrono::nanoseconds NvmlDeadline::limit() const {
  const std::lock_guard lock(state_->mutex);
  return state_->limit;
}

bool NvmlDeadline::run(std::function<void()> job) {
  BlockingRegion region;
  std::unique_lock lock(state_->mutex);
  if (state_->away > 0) return false;
  const auto outcome = std::make_shared<Outcome>();
  try {
    std::thread([state = state_, outcome, job = std::move(job)]() mutable {
      job();
      job = nullptr;  // and what it owns, before anybody may go on
      const std::lock_guard finished(state->mutex);
      outcome->done = true;
      if (outcome->given_up) --state->away;
      state->returned.notify_all();
    }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  const auto give_up = [&] {
    if (outcome->done) return;
    outcome->given_up = true;
    ++state_->away;
  };
  try {
    if (wait_polled(region, state_->returned, lock, state_->limit, [&] { return outcome->done; })) return true;
  } catch (...) {
    const std::lock_guard again(state_->mutex);
    give_up();
    throw;
  }
  give_up();
  return false;
}

}  // namespace paceline::cuda
