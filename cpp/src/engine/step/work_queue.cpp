// SPDX-License-Identifier: Apache-2.0
#include "engine/step/work_queue.hpp"

#include <utility>

namespace paceline::internal {
namespace {

/// Exactly what a script says.
class ScriptedQueue final : public WorkQueue {
 public:
  explicit ScriptedQueue(StepOptions options)
      : WorkQueue(options.shares, false),
        script_(std::move(options.script)),
        next_(script_.size(), 0),
        plan_(std::move(options.plan)) {}

 private:
  MicroBatch own(std::size_t device) override { return script_[device][next_[device]++]; }
  std::optional<MicroBatch> take_over(std::size_t, double) override { return std::nullopt; }
  void hand_out(std::size_t, MicroBatch& next, double) override {
    if (plan_ != nullptr && plan_->by_cost()) next.items = plan_->items(next.begin, next.end);
  }
  [[nodiscard]] bool has_own(std::size_t device) const override { return next_[device] < script_[device].size(); }
  [[nodiscard]] double finish_of(std::size_t, double) const override { return 0.0; }

  std::vector<std::vector<MicroBatch>> script_;
  std::vector<std::size_t> next_;
  std::shared_ptr<const BatchPlan> plan_;
};

}  // namespace

std::unique_ptr<WorkQueue> WorkQueue::of(StepOptions options) {
  if (!options.script.empty()) return std::make_unique<ScriptedQueue>(std::move(options));
  if (options.plan == nullptr || !options.plan->by_cost()) return planned_queue(std::move(options));
  return item_queue(options.plan, options.stealing, options.any_size, options.least_items);
}

WorkQueue::WorkQueue(const std::vector<std::int64_t>& shares, bool stealing) {
  for (const std::int64_t share : shares) devices_.push_back({.takes_over = stealing && share > 0});
}

std::optional<MicroBatch> WorkQueue::claim(std::size_t device, double now_seconds) {
  const std::lock_guard lock(mutex_);
  DeviceState& here = devices_[device];
  if (cancelled_ || here.left) return std::nullopt;
  std::optional<MicroBatch> next;
  if (has_own(device)) {
    next = own(device);
  } else if (here.takes_over) {
    next = take_over(device, now_seconds);
  }
  if (!next) {
    here.left = !here.takes_over || !came_early(device);
    return std::nullopt;
  }
  hand_out(device, *next, now_seconds);
  next->last = !has_own(device) && (!here.takes_over || nothing_left());
  return next;
}

bool WorkQueue::asks_again(std::size_t device) {
  const std::lock_guard lock(mutex_);
  runs_dry(device);
  return !cancelled_ && !devices_[device].left;
}

bool WorkQueue::exhausted() {
  const std::lock_guard lock(mutex_);
  return cancelled_ || nothing_left();
}

void WorkQueue::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool WorkQueue::nothing_left() const {
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    if (has_own(d)) return false;
  }
  return !any_common();
}

std::optional<WorkQueue::Victim> WorkQueue::find_victim(std::size_t thief, double now) const {
  std::optional<Victim> victim;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    if (d == thief || !has_own(d)) continue;
    const double finish = finish_of(d, now);
    if (!victim || finish > victim->finish) victim = Victim{d, finish};
  }
  return victim;
}

}  // namespace paceline::internal
