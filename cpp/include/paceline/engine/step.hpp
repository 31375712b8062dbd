// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

namespace engine {
class StepPieces;
class StepSource;
}  // namespace engine

/// One micro-batch that ran. Times in seconds on the step's clock (0: the step was handed to the workers).
struct ClaimRecord {
  MicroBatch micro_batch;
  double start_seconds = 0.0;
  double finish_seconds = 0.0;
  bool excluded = false;
};

/// What the workers do in one step. Called on the worker threads, concurrently for different devices.
///
/// Lifecycle on each worker: slot(), and run() for the micro-batch that it then claims, until there is none; finish().
/// When every item has run and every device that took part has finished without an error, reduction() is asked once, on
/// the worker that finished last, and all workers work it off together. A device without a share takes no part, and one
/// whose worker wakes when others have run its share is not waited for: nothing is called for it. Each of them may
/// throw: the step then stops at the next claims, nothing is reduced, and the step reports it.
class PACELINE_API StepProgram {
 public:
  virtual ~StepProgram();
  /// Forward and backward of one micro-batch. True: its time is no evidence (compilation, a first run).
  virtual bool run(const MicroBatch& micro_batch) = 0;
  /// After a run() with MicroBatch::measure: the most bytes that it took beyond what was in use before, 0 where that
  /// cannot be seen. None: there was nothing to do.
  [[nodiscard]] virtual std::optional<std::int64_t> memory_bytes(std::size_t device_index);
  /// The event that must be done before the device claims its next micro-batch; null: none. A device that claims no
  /// earlier than it must leaves more for others to take over.
  [[nodiscard]] virtual const Event* slot(std::size_t device_index);
  /// The event that must be done before the device claims once more, after a claim came back empty while it was at
  /// work: the end of all that it was given. Null: none.
  [[nodiscard]] virtual const Event* idle(std::size_t device_index);
  /// How long the device waits for either event at most.
  [[nodiscard]] virtual std::chrono::nanoseconds patience() const;
  /// Called when an event has taken longer. Throws the error that the step then fails with.
  virtual void give_up(const Event& event);
  virtual void finish(std::size_t device_index);
  /// After the step, before its times are used: puts right those that the host's clock cannot know. The host saw when
  /// work was enqueued; devices that do it later have clocks of their own.
  virtual void stamp(std::vector<ClaimRecord>& claims) const;
  /// Whether stamp() can tell already; settle() returns when it can. @throws Error if a device has failed.
  [[nodiscard]] virtual bool settled() const;
  virtual void settle() const;
  /// What to sum, in memory that stays valid until the step is over. Empty: nothing.
  virtual std::vector<ReductionSegment> reduction();
};

struct StepOptions {
  std::vector<std::int64_t> shares{};     ///< per device of the group; their sum is the batch
  std::vector<plan::CostModel> models{};  ///< per device, or empty: nothing measured yet
  std::vector<double> noise{};            ///< per device, or empty
  std::int64_t micro_batch = 0;           ///< > 0: fixed size; 0: one planned chunk, then corrections
  std::int64_t granularity = 1;
  /// No micro-batch has fewer items, where no share has. More than half of `micro_batch`: then up to
  /// 2 * least_items - 1 are allowed.
  std::int64_t least_items = 1;
  bool stealing = true;  ///< false: exactly the shares
  /// Per device, or empty: how many micro-batches it still has to do, the first of them just begun, when it claims one
  /// more. None where the work is done when the call returns.
  std::vector<std::int64_t> run_ahead{};
  /// Not empty: exactly these micro-batches, for each device in this order, instead of `shares`, `micro_batch` and
  /// `stealing`. So a step runs again as it once ran.
  std::vector<std::vector<MicroBatch>> script{};
  /// What the step follows, and carries to StepLoop::commit. With costs the step claims the plan's own micro-batches,
  /// and `models`, `noise`, `micro_batch` and `granularity` count for nothing. Null: the other options say it all.
  std::shared_ptr<const BatchPlan> plan{};
  bool any_size = true;  ///< with costs: whether a part of a planned micro-batch may be taken over
  /// In which pieces claims are worked off. Only a StepLoop makes them; null: each claim runs whole.
  std::shared_ptr<engine::StepPieces> pieces{};
};

struct PACELINE_API StepRecord {
  std::vector<ClaimRecord> claims;  ///< by device, in the order they ran
  double compute_seconds = 0.0;     ///< from the first start to the last finish of a micro-batch: the makespan
  double reduce_seconds = 0.0;  ///< from there to the end of the reduction; 0, not measured, with asynchronous devices
  double step_seconds = 0.0;    ///< from handing the step to the workers to the end of the reduction
  /// As balance::StepTimings::startup_seconds; empty, not measured, with asynchronous devices and scripts.
  std::vector<std::optional<double>> startup_seconds{};

  [[nodiscard]] balance::StepTimings timings(std::size_t device_count) const;
  /// Items that each device really ran.
  [[nodiscard]] std::vector<std::int64_t> items(std::size_t device_count) const;
};

/// The first error of a step, with what is needed to say where it happened.
struct StepFailure {
  std::exception_ptr error;
  /// The micro-batch that was running, empty (begin == end) in finish(). None where no single device is to blame: in
  /// reduction(), and after cancel().
  std::optional<MicroBatch> micro_batch;
};

/// One step of a group: hands out the shares as micro-batches and runs the program. cancel() may be called from any
/// thread. Destroying it while workers are still inside the program is legal: they keep what they use.
class PACELINE_API Step {
 public:
  /// @throws InvalidArgument if the options do not fit the group.
  Step(DeviceGroup group, std::shared_ptr<StepProgram> program, StepOptions options);
  ~Step();
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void start();
  /// Waits as DeviceGroup::wait. True: the step is over, one way or the other.
  bool wait(const DeviceGroup::Between& between = {});
  /// No further micro-batch starts; those that run come to their end. Then failure() holds Cancelled. Without effect
  /// once the reduction has begun.
  void cancel();
  /// A function that does so, for as long as the step exists; calling it later is harmless. Any thread.
  [[nodiscard]] std::function<void()> canceller() const;
  /// StepOptions::plan.
  [[nodiscard]] const std::shared_ptr<const BatchPlan>& plan() const noexcept { return plan_; }
  /// StepOptions::pieces.
  [[nodiscard]] const std::shared_ptr<engine::StepPieces>& pieces() const noexcept { return pieces_; }
  /// How many micro-batches ran, and whether a device ran several, not counting those that memory asked for. After
  /// wait().
  [[nodiscard]] std::int64_t micro_batches() const;
  [[nodiscard]] bool divided() const;
  /// After wait(): what went wrong, or null.
  [[nodiscard]] const StepFailure* failure() const noexcept;
  /// After wait(): throws if there was a failure. An error of the type that the program threw (Timeout, OutOfMemory,
  /// DeviceLost, ...; OutOfMemory for std::bad_alloc, Error for what is not of this library), which names the device
  /// and the items, with the program's own exception nested in it (std::rethrow_if_nested); Cancelled as it is.
  void rethrow_failure() const;
  /// Items that each device ran. After wait() without a failure.
  [[nodiscard]] std::vector<std::int64_t> items() const;
  /// Whether the devices' own times are known; settle() returns when they are. After wait() without a failure.
  [[nodiscard]] bool settled() const;
  void settle() const;
  /// After that.
  [[nodiscard]] StepRecord record() const;

 private:
  DeviceGroup group_;
  std::shared_ptr<const BatchPlan> plan_;
  std::shared_ptr<engine::StepPieces> pieces_;
  std::shared_ptr<engine::StepSource> source_;
};

/// start(), wait(), rethrow_failure() and record(). When `between` ends the wait the step is cancelled.
PACELINE_API StepRecord run_step(const DeviceGroup& group, const std::shared_ptr<StepProgram>& program,
                                 StepOptions options, const DeviceGroup::Between& between = {});

}  // namespace paceline
