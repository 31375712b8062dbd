// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/engine/pipeline_step.hpp>
#include <paceline/plan/schedule.hpp>

namespace paceline {

/// Calls a function for each action.
class CallingProgram final : public PipelineProgram {
 public:
  explicit CallingProgram(
      std::function<void(const StageAction&)> run, std::function<void()> give_up = [] {})
      : run_(std::move(run)), give_up_(std::move(give_up)) {}
  void run(const StageAction& action, Turn&) override { run_(action); }
  void give_up() noexcept override { give_up_(); }

 private:
  std::function<void(const StageAction&)> run_;
  std::function<void()> give_up_;
};

/// Checks at the beginning of each action that all that it needs has ended, and that its stage holds no more
/// micro-batches than the schedule says.
class ActionChecker {
 public:
  ActionChecker(plan::Schedule schedule, std::vector<DeviceId> devices)
      : schedule_(std::move(schedule)), devices_(std::move(devices)), held_(devices_.size(), 0) {}

  void begin(const StageAction& action) {
    using Kind = plan::Action::Kind;
    const std::lock_guard lock(mutex_);
    const auto needs = [&](std::size_t stage, Kind kind) {
      expect(ended_.count({stage, kind, action.micro_batch}) == 1, action, "began before its input");
    };
    expect(begun_.insert({action.stage, action.kind, action.micro_batch}).second, action, "ran twice");
    expect(action.device == devices_[action.stage], action, "is on another device");
    expect(working_.insert(action.device).second, action, "ran beside another action of its device");
    if (action.kind == Kind::forward) {
      if (action.stage > 0) needs(action.stage - 1, Kind::forward);
      const std::int64_t held = ++held_[action.stage];
      expect(!has_backwards() || held <= plan::in_flight(schedule_, action.stage), action, "is one too many in flight");
    } else {
      needs(action.stage, Kind::forward);
      if (action.stage + 1 < devices_.size()) needs(action.stage + 1, Kind::backward);
    }
  }

  void end(const StageAction& action) {
    const std::lock_guard lock(mutex_);
    working_.erase(action.device);
    if (action.kind == plan::Action::Kind::backward) --held_[action.stage];
    ended_.insert({action.stage, action.kind, action.micro_batch});
  }

  [[nodiscard]] std::vector<std::string> problems() const {
    const std::lock_guard lock(mutex_);
    return problems_;
  }
  [[nodiscard]] std::size_t ran() const {
    const std::lock_guard lock(mutex_);
    return ended_.size();
  }
  [[nodiscard]] std::size_t expected() const {
    std::size_t count = 0;
    for (const auto& actions : schedule_.stages) count += actions.size();
    return count;
  }

 private:
  [[nodiscard]] bool has_backwards() const { return plan::in_flight(schedule_, 0) > 0; }
  void expect(bool holds, const StageAction& action, const char* what) {
    if (holds) return;
    problems_.push_back((action.kind == plan::Action::Kind::forward ? "F" : "B") + std::to_string(action.micro_batch) +
                        " of stage " + std::to_string(action.stage) + " " + what);
  }

  using Key = std::tuple<std::size_t, plan::Action::Kind, std::int64_t>;
  plan::Schedule schedule_;
  std::vector<DeviceId> devices_;
  mutable std::mutex mutex_;
  std::vector<std::int64_t> held_;  // micro-batches in flight at each stage
  std::set<DeviceId> working_;
  std::set<Key> begun_;
  std::set<Key> ended_;
  std::vector<std::string> problems_;
};

class CheckingProgram final : public PipelineProgram, public ActionChecker {
 public:
  using ActionChecker::ActionChecker;
  void run(const StageAction& action, Turn&) override {
    begin(action);
    end(action);
  }
};

}  // namespace paceline
