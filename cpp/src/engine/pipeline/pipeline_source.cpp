// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/pipeline_source.hpp"

#include <algorithm>
#include <utility>

namespace paceline::internal {
namespace {

using Kind = plan::Action::Kind;
constexpr std::size_t kKinds = 2;

}  // namespace

PipelineSource::PipelineSource(std::shared_ptr<PipelineProgram> program, plan::Schedule schedule,
                               std::vector<DeviceId> devices)
    : program_(std::move(program)),
      schedule_(std::move(schedule)),
      devices_(std::move(devices)),
      stages_(devices_.size()),
      ended_(devices_.size() * kKinds * static_cast<std::size_t>(schedule_.micro_batches)) {
  for (std::size_t s = 0; s < devices_.size(); ++s) stages_[s].record.reserve(schedule_.stages[s].size());
}

std::size_t PipelineSource::stage_of(DeviceId device) const {
  return static_cast<std::size_t>(std::ranges::find(devices_, device) - devices_.begin());
}

StageAction PipelineSource::action(std::size_t stage, std::size_t position) const {
  const plan::Action& action = schedule_.stages[stage][position];
  return {.stage = stage, .device = devices_[stage], .kind = action.kind, .micro_batch = action.micro_batch};
}

std::atomic<bool>& PipelineSource::ended(std::size_t stage, const plan::Action& action) {
  const auto count = static_cast<std::size_t>(schedule_.micro_batches);
  return ended_[(stage * kKinds + static_cast<std::size_t>(action.kind)) * count +
                static_cast<std::size_t>(action.micro_batch)];
}

bool PipelineSource::has_ended(std::size_t stage, Kind kind, std::int64_t micro_batch) const {
  return const_cast<PipelineSource*>(this)->ended(stage, {kind, micro_batch}).load(std::memory_order_acquire);
}

bool PipelineSource::ready(const StageAction& action) const {
  const std::size_t stage = action.stage;
  if (action.kind == Kind::forward) return stage == 0 || has_ended(stage - 1, Kind::forward, action.micro_batch);
  if (stage + 1 == stages_.size()) return has_ended(stage, Kind::forward, action.micro_batch);
  return has_ended(stage + 1, Kind::backward, action.micro_batch);
}

NextWork PipelineSource::next(DeviceId device, Clock::time_point) noexcept {
  const std::size_t stage = stage_of(device);
  const StageState& state = stages_[stage];
  if (!state.entered && !enter(stage)) return NextWork::done();
  if (over_.load(std::memory_order_acquire) || state.position == schedule_.stages[stage].size()) {
    leave(stage);
    return NextWork::done();
  }
  if (!ready(action(stage, state.position))) return NextWork::wait();  // the neighbour's done() wakes the worker
  return NextWork::take(static_cast<std::int64_t>(state.position));
}

void PipelineSource::perform(DeviceId device, std::int64_t work, Turn& turn) {
  program_->run(action(stage_of(device), static_cast<std::size_t>(work)), turn);
}

void PipelineSource::done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept {
  const std::size_t stage = stage_of(device);
  StageState& state = stages_[stage];
  const StageAction ran = action(stage, static_cast<std::size_t>(work));
  state.record.push_back({ran, seconds_at(timing.start), seconds_at(timing.finish)});
  ++state.position;
  ended(stage, {ran.kind, ran.micro_batch}).store(true, std::memory_order_release);
  if (ran.kind == Kind::forward && stage + 1 < stages_.size()) wake(devices_[stage + 1]);
  if (ran.kind == Kind::backward && stage > 0) wake(devices_[stage - 1]);
}

void PipelineSource::failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept {
  fail(std::move(error), action(stage_of(device), static_cast<std::size_t>(work)));
}

void PipelineSource::cancel(std::exception_ptr reason) noexcept {
  fail(std::move(reason), {.device = devices_.front()});
}

std::vector<std::vector<ActionRecord>> PipelineSource::record() const {
  std::vector<std::vector<ActionRecord>> record;
  for (const StageState& state : stages_) record.push_back(state.record);
  return record;
}

bool PipelineSource::enter(std::size_t stage) noexcept {
  const std::lock_guard lock(mutex_);
  if (decided_) return false;
  stages_[stage].entered = true;
  ++entered_;
  return true;
}

void PipelineSource::leave(std::size_t stage) noexcept {
  if (std::exchange(stages_[stage].left, true)) return;
  {
    const std::lock_guard lock(mutex_);
    ++left_;
  }
  settle();
}

/// A step that has failed is complete when those have left that have come. Behind other steps some may not come for
/// long, and who waits for this one is not made to wait for them.
void PipelineSource::settle() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (decided_ || left_ < (failure_ ? entered_ : stages_.size())) return;
    decided_ = true;
  }
  complete_.store(true, std::memory_order_release);
  wake_caller();
}

void PipelineSource::fail(std::exception_ptr error, const StageAction& at) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (decided_ || failure_) return;
    failure_ = PipelineFailure{std::move(error), at};
    // Under the lock: a worker whose own failure comes second must not find the step still open, and run its action
    // again.
    over_.store(true, std::memory_order_release);
  }
  program_->give_up();
  settle();
  wake_all();
}

double PipelineSource::seconds_at(Clock::time_point time) const {
  return std::chrono::duration<double>(time - start_).count();
}

}  // namespace paceline::internal
