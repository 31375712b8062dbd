// SPDX-License-Identifier: Apache-2.0
#include "engine/pool/user_placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {
namespace {

constexpr int kAnswersInARow = 64;  // by a thread that had something else to do; then a worker goes on
constexpr double kAskAgain = 0.05;  // seconds, since an answer may depend on the time

}  // namespace

struct UserPlacement::Question {
  explicit Question(const plan::PoolQuestion& from)
      : asked(from), kind(from.kind_name), candidates(from.candidates.begin(), from.candidates.end()) {
    names.reserve(candidates.size());
    for (plan::PoolCandidate& one : candidates) one.name = names.emplace_back(one.name);
    asked.kind_name = kind;
    asked.candidates = candidates;
  }
  Question(const Question&) = delete;
  Question& operator=(const Question&) = delete;

  [[nodiscard]] bool same(const plan::PoolQuestion& other) const {
    const auto alike = [](const plan::PoolCandidate& a, const plan::PoolCandidate& b) {
      return a.device == b.device && a.idle == b.idle;
    };
    return asked.job == other.job && std::ranges::is_permutation(candidates, other.candidates, alike);
  }
  [[nodiscard]] std::optional<std::size_t> fastest_idle() const {
    const auto one = std::ranges::find(candidates, true, &plan::PoolCandidate::idle);
    return one == candidates.end() ? std::nullopt : std::optional(one->device);
  }

  plan::PoolQuestion asked;
  std::string kind;
  std::vector<std::string> names = {};
  std::vector<plan::PoolCandidate> candidates;
  std::optional<std::size_t> answer = {};
};

UserPlacement::Choose UserPlacement::look_up(Choose choose) {
  choose_ = std::move(choose);
  return [this](const plan::PoolQuestion& asked) { return known(asked); };
}

std::optional<std::size_t> UserPlacement::known(const plan::PoolQuestion& asked) {
  if (std::ranges::none_of(asked.candidates, &plan::PoolCandidate::idle)) return {};
  if (const auto found = answers_.find(asked.job); found != answers_.end()) {
    const Question& one = *found->second;
    if (one.same(asked) && (one.answer || one.asked.waiting == asked.waiting)) return one.answer;
  }
  // One event may decide several times, and only the last question has what is idle after it.
  if (open_ == nullptr || (open_->asked.job == asked.job && !open_->same(asked)))
    open_ = std::make_shared<Question>(asked);
  return {};
}

bool UserPlacement::begin(const std::function<bool(plan::JobId)>& waits) {
  if (asking_ || open_ == nullptr) return false;
  if (!waits(open_->asked.job)) {
    open_ = nullptr;
    return false;
  }
  if (answers_.empty()) waits_ = false;  // otherwise the round goes on
  asking_ = next();
  return true;
}

bool UserPlacement::next() {
  current_ = std::exchange(open_, nullptr);
  if (current_ == nullptr) end();
  return current_ != nullptr;
}

void UserPlacement::end() {
  asking_ = false;
  answers_.clear();
}

void UserPlacement::put_off() {
  open_ = std::move(current_);
  asking_ = false;
}

std::optional<std::size_t> UserPlacement::ask() noexcept {
  error_.clear();
  try {
    return choose_(current_->asked);
  } catch (const std::exception& why) {
    error_ = why.what();
  } catch (...) {
  }
  if (error_.empty()) error_ = "an unknown error";
  return current_->fastest_idle();
}

void UserPlacement::answer(std::optional<std::size_t> device, bool last) {
  if (!error_.empty()) {
    ++failures_;
    last_failure_ = std::exchange(error_, {});
  }
  for (const plan::PoolCandidate& one : current_->candidates) {
    if (one.idle && device == one.device) current_->answer = device;
  }
  if (last && !current_->answer && std::ranges::all_of(current_->candidates, &plan::PoolCandidate::idle))
    current_->answer = current_->fastest_idle();
  waits_ |= !current_->answer;
  const plan::JobId job = current_->asked.job;
  answers_[job] = std::move(current_);
  open_ = nullptr;  // what is open is asked again by the decision that follows
}

std::string UserPlacement::explain() const {
  if (failures_ == 0) return {};
  return fmt::format("The placement failed {} times, the last time by: {}. The fastest idle device took these jobs.\n",
                     failures_, last_failure_);
}

bool PoolCore::begin_to_ask() {
  return placement_.begin([this](JobId id) {
    const auto job = jobs_.find(id);
    return job != jobs_.end() && job->second.run == plan::RunId{};
  });
}

void PoolCore::place_by_user() noexcept {
  bool more = true;
  for (int asked = 1; more; ++asked) {
    std::optional<std::size_t> device;
    {
      const Inside guard(*this);
      device = placement_.ask();
    }
    if (forked()) return;  // in the function
    After after;
    {
      const std::lock_guard lock(mutex_);
      placement_.answer(device, closed_);
      apply(state_.tick(now()), after);
      more = placement_.next();
      if (more && asked == kAnswersInARow) {
        more = false;
        placement_.put_off();
        after.wake_all = true;
      }
      if (!more && placement_.waits()) {
        wake_seconds_ = std::min(wake_seconds_, now() + kAskAgain);
        keep_time(after, wake_seconds_);
        after.wake_all |= !clock_.started();
      }
      if (!more) room_.notify_all();  // see wait_for_placement()
    }
    follow(std::move(after), false);
  }
}

}  // namespace paceline::internal
