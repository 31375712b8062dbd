// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/schedule.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/turn.hpp>

namespace paceline {

namespace internal {
class PipelineSource;
}  // namespace internal

/// One action of a pipeline's step, with where it runs.
struct StageAction {
  std::size_t stage = 0;
  DeviceId device{};
  plan::Action::Kind kind = plan::Action::Kind::forward;
  std::int64_t micro_batch = 0;
};

/// When an action ran, in seconds on the step's clock (0: the step was handed to the workers). The wait for its input
/// and for its device is not in it.
struct ActionRecord {
  StageAction action;
  double start_seconds = 0.0;
  double finish_seconds = 0.0;
};

/// What went wrong first, and in which action.
struct PipelineFailure {
  std::exception_ptr error;
  StageAction action;
};

/// What the actions of a step do.
class PACELINE_API PipelineProgram {
 public:
  virtual ~PipelineProgram();
  /// Runs an action on its device's worker, which has the `turn`. Its input has arrived: the actions that it depends on
  /// have returned. Called for one action per device at a time, at the same time for different devices. May throw: then
  /// no further action starts.
  virtual void run(const StageAction& action, Turn& turn) = 0;
  /// The step has failed or was cancelled, and starts no further action. An action that waits for something must come
  /// back soon. Called once, on any thread.
  virtual void give_up() noexcept {}
};

/// One step of a pipeline: every stage runs its list of actions in order, on the worker of its device, each as soon as
/// its input has arrived. Nothing is decided while it runs. Any thread may call cancel(). It may be destroyed while
/// workers are still inside the program; they keep what they use.
class PACELINE_API PipelineStep {
 public:
  /// `devices` has the device of each stage.
  /// @throws InvalidArgument for a schedule that plan::check() refuses, for another number of devices than stages, a
  /// device that is not in the group, or one that has two stages.
  PipelineStep(DeviceGroup group, std::shared_ptr<PipelineProgram> program, plan::Schedule schedule,
               std::vector<DeviceId> devices);
  ~PipelineStep();
  PipelineStep(const PipelineStep&) = delete;
  PipelineStep& operator=(const PipelineStep&) = delete;

  void start();
  /// Waits like DeviceGroup::wait. Returns true when the step has succeeded or failed.
  bool wait(const DeviceGroup::Between& between = {});
  /// Lets no further action start. Those that run come to their end, then failure() holds Cancelled.
  void cancel();

  [[nodiscard]] const plan::Schedule& schedule() const noexcept;
  [[nodiscard]] const std::vector<DeviceId>& devices() const noexcept;
  /// After wait(): what went wrong, or null.
  [[nodiscard]] const PipelineFailure* failure() const noexcept;
  /// After wait(): throws if there was a failure, as Step::rethrow_failure(): the error keeps its type, and names
  /// stage, device and micro-batch.
  void rethrow_failure() const;
  /// After wait(): what ran, per stage in order.
  [[nodiscard]] std::vector<std::vector<ActionRecord>> record() const;

 private:
  DeviceGroup group_;
  std::shared_ptr<internal::PipelineSource> source_;
};

}  // namespace paceline
