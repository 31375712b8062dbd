// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

namespace internal {
class StepPieces;
class StepSource;
}  // namespace internal

/// One micro-batch that ran. Times in seconds on the step's clock (0: the step was handed to the workers).
struct ClaimRecord {
  MicroBatch micro_batch;
  double start_seconds = 0.0;
  double finish_seconds = 0.0;
  bool excluded = false;
  /// For a device's first one: seconds from the parameters being ready at home until they were at the device.
  double arrival_seconds = 0.0;
  /// In which the device did other work between two pieces. 0 (not measured) with asynchronous devices.
  double lent_seconds = 0.0;

  /// What it took on its own.
  [[nodiscard]] double seconds() const noexcept { return finish_seconds - start_seconds - lent_seconds; }
};

/// The work of one step. The worker threads call it, concurrently for different devices.
///
/// Lifecycle on each worker: slot(), claim a micro-batch, run() it, and so on until there is no micro-batch left; then
/// finish(). When every item has run and every participating device has finished without an error, the worker that
/// finished last calls reduction() once, and all workers carry out the reduction together. Nothing is called for a
/// device without a share, or for a device whose worker wakes after others have run its share. Each call may throw. The
/// step then hands out no more micro-batches, reduces nothing, and reports the error.
class PACELINE_API StepProgram {
 public:
  virtual ~StepProgram();
  /// Forward and backward of one micro-batch. True: its time is no evidence (compilation, a first run).
  virtual bool run(const MicroBatch& micro_batch) = 0;
  /// Asked after a run() with MicroBatch::measure. Returns the peak of the bytes that the run took in addition to what
  /// was in use before it; 0 if that cannot be measured; none if the run had nothing to do.
  [[nodiscard]] virtual std::optional<std::int64_t> memory_bytes(DeviceId /*device*/) { return 0; }
  /// The event that must be done before the device claims its next micro-batch; null: none. Claiming late leaves more
  /// for other devices to take over.
  [[nodiscard]] virtual const Event* slot(DeviceId /*device*/) { return nullptr; }
  /// The event that is done when the device has run everything that it was given; null: nothing. The device waits for
  /// it, and claims once more, when a claim came back empty while it was still at work.
  [[nodiscard]] virtual const Event* idle(DeviceId /*device*/) { return nullptr; }
  /// The longest wait for either event. By default that of DeviceQueueOptions.
  [[nodiscard]] virtual std::chrono::nanoseconds patience() const { return std::chrono::minutes(10); }
  /// Called when an event has taken longer. The step fails with what it throws, or else with the Timeout of wait_for().
  virtual void give_up(const Event& /*event*/) {}
  virtual void finish(DeviceId /*device*/) {}
  /// After the step, before its times are used: replaces the times that the host's clock cannot know. The host only saw
  /// when work was enqueued; devices that work later have clocks of their own.
  virtual void stamp(std::vector<ClaimRecord>& /*claims*/) const {}
  /// Whether the times for stamp() are known; settle() waits until they are. @throws Error if a device has failed.
  [[nodiscard]] virtual bool settled() const { return true; }
  virtual void settle() const {}
  /// The sums to compute, in memory that stays valid until the step is over. Empty: none.
  virtual std::vector<ReductionSegment> reduction() { return {}; }
};

struct StepOptions {
  std::vector<std::int64_t> shares{};     ///< per device of the group; their sum is the batch
  std::vector<plan::CostModel> models{};  ///< per device, or empty: nothing measured yet
  std::vector<double> noise{};            ///< per device, or empty
  std::int64_t micro_batch = 0;           ///< > 0: fixed size; 0: one planned chunk, then corrections
  std::int64_t granularity = 1;
  /// The fewest items of a micro-batch, if no share has fewer. If it is more than half of `micro_batch`, micro-batches
  /// may have up to 2 * least_items - 1 items.
  std::int64_t least_items = 1;
  bool stealing = true;  ///< false: exactly the shares
  /// Per device: how many micro-batches it still has to do when it claims the next one. The first of them has just
  /// begun. Empty: 0 for all, since their work is done when the call returns.
  std::vector<std::int64_t> run_ahead{};
  /// If not empty, each device runs exactly these micro-batches in this order, whatever `shares`, `micro_batch` and
  /// `stealing` say. This repeats a recorded step.
  std::vector<std::vector<MicroBatch>> script{};
  /// The plan that the step follows, for StepLoop::commit. With costs the step claims the plan's own micro-batches and
  /// ignores `models`, `noise`, `micro_batch` and `granularity`. Null: the other options suffice.
  std::shared_ptr<const BatchPlan> plan{};
  bool any_size = true;  ///< with costs: whether a part of a planned micro-batch may be taken over
  /// The pieces that claims are cut into. Only a StepLoop gives them. Null: each claim runs whole.
  std::shared_ptr<internal::StepPieces> pieces{};
};

struct PACELINE_API StepRecord {
  std::vector<ClaimRecord> claims;  ///< by device, in the order they ran
  double compute_seconds = 0.0;     ///< from the first start to the last finish of a micro-batch: the makespan
  double reduce_seconds = 0.0;  ///< from there to the end of the reduction; 0 (not measured) with asynchronous devices
  double step_seconds = 0.0;    ///< from handing the step to the workers to the end of the reduction
  /// See balance::StepTimings::startup_seconds. Empty (not measured) in scripts.
  std::vector<std::optional<double>> startup_seconds{};
  /// See balance::StepTimings::lent_parts. Empty with asynchronous devices, too, where it is not measured.
  std::vector<double> lent_parts{};

  /// For these devices (DeviceGroup::ids()), in their order.
  [[nodiscard]] balance::StepTimings timings(std::span<const DeviceId> devices) const;
  /// Items that each of these devices really ran.
  [[nodiscard]] std::vector<std::int64_t> items(std::span<const DeviceId> devices) const;
};

/// The first error of a step, and where it happened.
struct StepFailure {
  std::exception_ptr error;
  /// The micro-batch that was running; empty (begin == end) in finish(). None if no single device is to blame: in
  /// reduction(), and after cancel().
  std::optional<MicroBatch> micro_batch;
};

/// One step of a group: hands out the shares as micro-batches and runs the program. Any thread may call cancel(). It
/// may be destroyed while workers are still inside the program; they keep what they use.
class PACELINE_API Step {
 public:
  /// @throws InvalidArgument if the options do not fit the group.
  Step(DeviceGroup group, std::shared_ptr<StepProgram> program, StepOptions options);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void start();
  /// When start() was called, which is 0 on the step's clock.
  [[nodiscard]] std::chrono::steady_clock::time_point started() const noexcept;
  /// Waits like DeviceGroup::wait. Returns true when the step has succeeded or failed.
  bool wait(const DeviceGroup::Between& between = {});
  /// Lets no further micro-batch start. Those that run come to their end, then failure() holds Cancelled. Has no effect
  /// once the reduction has begun.
  void cancel();
  /// Per device, whether it may get work in this step: it has a share, or micro-batches in the script.
  [[nodiscard]] std::vector<bool> takes_part() const;
  /// StepOptions::plan.
  [[nodiscard]] const std::shared_ptr<const BatchPlan>& plan() const noexcept { return plan_; }
  /// StepOptions::pieces, never null.
  [[nodiscard]] const std::shared_ptr<internal::StepPieces>& pieces() const noexcept { return pieces_; }
  /// After wait(): how many micro-batches ran, and whether a device ran several, not counting the cuts because of
  /// memory.
  [[nodiscard]] std::int64_t micro_batches() const;
  [[nodiscard]] bool divided() const;
  /// After wait(): what went wrong, or null.
  [[nodiscard]] const StepFailure* failure() const noexcept;
  /// After wait(): throws if there was a failure. The error has the type that the program threw (Timeout, OutOfMemory,
  /// DeviceLost, ...), OutOfMemory for std::bad_alloc, or Error for types that are not of this library. It names the
  /// device and the items, and holds the program's own exception (std::rethrow_if_nested). Cancelled is thrown as it
  /// is.
  void rethrow_failure() const;
  /// Items that each device ran. After wait() without a failure.
  [[nodiscard]] std::vector<std::int64_t> items() const;
  /// After wait() without a failure: whether the devices' own times are known. settle() waits until they are.
  [[nodiscard]] bool settled() const;
  void settle() const;
  /// After settle().
  [[nodiscard]] StepRecord record() const;

 private:
  DeviceGroup group_;
  std::shared_ptr<const BatchPlan> plan_;
  std::shared_ptr<internal::StepPieces> pieces_;
  std::shared_ptr<internal::StepSource> source_;
};

/// Calls start(), wait(), rethrow_failure() and record(). If `between` ends the wait, the step is cancelled.
PACELINE_API StepRecord run_step(const DeviceGroup& group, const std::shared_ptr<StepProgram>& program,
                                 StepOptions options, const DeviceGroup::Between& between = {});

}  // namespace paceline
