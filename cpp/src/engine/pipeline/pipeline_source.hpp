// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <paceline/engine/pipeline_step.hpp>
#include <paceline/runtime/work_source.hpp>

namespace paceline::internal {

/// The step of a pipeline as the workers see it: a source whose next work, for a device, is the next action of its
/// stage's list, once the input of that action has arrived.
class PipelineSource final : public WorkSource {
 public:
  /// Requires: a checked schedule, and `devices` each once, which are those that it is opened on.
  PipelineSource(std::shared_ptr<PipelineProgram> program, plan::Schedule schedule, std::vector<DeviceId> devices);

  /// Sets the step's clock to 0. Call it right before the workers get the step.
  void start_clock() { start_ = Clock::now(); }

  [[nodiscard]] NextWork next(DeviceId device, Clock::time_point now) noexcept override;
  void perform(DeviceId device, std::int64_t work, Turn& turn) override;
  void done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept override;
  void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept override;
  void cancel(std::exception_ptr reason) noexcept override;
  [[nodiscard]] bool complete() const noexcept override { return complete_.load(std::memory_order_acquire); }

  [[nodiscard]] const plan::Schedule& schedule() const noexcept { return schedule_; }
  [[nodiscard]] const std::vector<DeviceId>& devices() const noexcept { return devices_; }

  // Call the rest when it is complete.
  [[nodiscard]] const PipelineFailure* failure() const noexcept { return failure_ ? &*failure_ : nullptr; }
  [[nodiscard]] std::vector<std::vector<ActionRecord>> record() const;

 private:
  // Only the worker of the stage's device writes it; `complete_` publishes it. Padded, so that neighbours do not share
  // a cache line.
  struct alignas(64) StageState {
    std::size_t position = 0;
    std::vector<ActionRecord> record;
    bool entered = false;
    bool left = false;
  };

  [[nodiscard]] std::size_t stage_of(DeviceId device) const;
  [[nodiscard]] StageAction action(std::size_t stage, std::size_t position) const;
  [[nodiscard]] bool ready(const StageAction& action) const;
  [[nodiscard]] std::atomic<bool>& ended(std::size_t stage, const plan::Action& action);
  [[nodiscard]] bool has_ended(std::size_t stage, plan::Action::Kind kind, std::int64_t micro_batch) const;
  [[nodiscard]] bool enter(std::size_t stage) noexcept;
  void leave(std::size_t stage) noexcept;
  void settle() noexcept;
  void fail(std::exception_ptr error, const StageAction& at) noexcept;
  [[nodiscard]] double seconds_at(Clock::time_point time) const;

  std::shared_ptr<PipelineProgram> program_;
  plan::Schedule schedule_;
  std::vector<DeviceId> devices_;  // of each stage
  std::vector<StageState> stages_;
  std::vector<std::atomic<bool>> ended_;  // by stage, kind and micro-batch
  Clock::time_point start_{};
  std::atomic<bool> over_{false};  // no further action starts
  std::atomic<bool> complete_{false};
  std::mutex mutex_;
  // Under the lock.
  std::size_t entered_ = 0;  // stages whose worker has come
  std::size_t left_ = 0;
  bool decided_ = false;  // whether it failed
  std::optional<PipelineFailure> failure_;
};

}  // namespace paceline::internal
