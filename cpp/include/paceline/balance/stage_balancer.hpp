// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/stages.hpp>

namespace paceline::balance {

/// What one stage measured in one step, in seconds: the busy time of each forward and of each backward, in the order of
/// the micro-batches. Waits for inputs and for the device are not in it.
struct MeasuredStage {
  std::vector<double> forwards;
  std::vector<double> backwards;
  bool excluded = false;  ///< compilation, first run of a size: no evidence
};

/// What it costs to move blocks from one memory space to another. Moves inside a memory space are free.
struct MoveCost {
  double bytes_per_second = 0.0;   ///< 0: the link of the problem; if that has none, copies take no time
  double first_run_seconds = 0.0;  ///< what the first step after a move takes longer: compilation, autotuning
};

/// One change of what runs.
struct StageMove {
  enum class Kind : std::uint8_t {
    depth,    ///< micro-batches or how many of them are in flight; always free
    cuts,     ///< first blocks or devices of the stages
    memory,   ///< a stage ran out of memory
    devices,  ///< a device was retired or restored
  };
  Kind kind = Kind::cuts;
  std::int64_t number = 0;  ///< of this change, from 0
  std::int64_t step = 0;
  std::vector<std::size_t> from_cuts, to_cuts;
  std::vector<std::size_t> from_order, to_order;
  double seconds_before = 0.0;   ///< of a step, as predicted
  double seconds_after = 0.0;    ///< of a step, as predicted
  std::int64_t moved_bytes = 0;  ///< that went to another memory space
  double cost_seconds = 0.0;     ///< what that takes, by MoveCost
  std::string reason;            ///< what had changed before
};

/// The closed loop of a pipeline: times of stages in, plans out. It keeps the costs of blocks, measured once, and the
/// speeds of devices current, and decides when stages change. Every plan is a pure function of the constructor's
/// arguments and of the calls made so far: no clock, no random numbers from outside, no thread. Not thread-safe.
///
/// - Speeds: a device's scale is its measured time over the time that its blocks should take. The estimator of Balancer
///   follows it: the median since the last change point, where two outliers on one side are a level shift.
/// - Blocks: a time that changes in the very step in which a stage gets other blocks is theirs: the device had been
///   measured before. Three steps correct the scale of the blocks that came. A factor beyond 1.5 is not believed of
///   blocks, which were measured, and counts as the device's. How a stage's time divides into forward and backward is
///   corrected with them.
/// - Depth and number of micro-batches change first, since they are free. A gain below max(1 %, 2 standard errors) is
///   no reason for any change.
/// - Cuts and devices move by ski rental (Karlin et al., Algorithmica 3, 1988): each step adds the regret T(now) -
///   T(best) - 2 standard errors, and they move when the sum reaches what the move costs. Among plans within 1 % of the
///   best the one wins that moves the fewest bytes.
/// - A device that was left out because it was slow counts as fast as at first after 64 steps, or after 20 for each
/// time
///   that it is slower, so that it is measured again. If it still is slow, it waits twice as long the next time.
///
/// @code
/// StageBalancer balancer(problem);
/// const plan::StagePlan& plan = balancer.plan(64);   // run it, then one entry per stage:
/// balancer.record(timings);
/// @endcode
class PACELINE_API StageBalancer {
 public:
  /// The batch size of the problem is not used. `previous_*` and `indifference` of the options are set here. A batch
  /// with too few items for the `micro_batches` of the options is planned with as many as it has items for.
  /// @throws InvalidArgument for a problem without blocks or devices, or a negative cost of moves.
  explicit StageBalancer(plan::StageProblem problem, plan::StageOptions options = {}, MoveCost cost = {});
  ~StageBalancer();
  StageBalancer(StageBalancer&&) noexcept;
  StageBalancer& operator=(StageBalancer&&) noexcept;

  /// What the next step runs. Stages stay where they are whatever the batch size; only micro-batches and depth depend
  /// on it. Asked again without a record in between (a step that failed), it returns the same plan. The reference holds
  /// until the next call of plan() or out_of_memory().
  /// @throws as plan::plan_stages(); nothing changes then.
  const plan::StagePlan& plan(std::int64_t batch_size);

  /// From the next plan on, every micro-batch has at least so many items, unless the batch has fewer: batch
  /// normalisation needs two. 1: no minimum.
  /// @throws InvalidArgument for less than 1.
  void set_least_items(std::int64_t items);

  /// The times of the plan that plan() last returned, one entry per stage. A step that failed is never recorded.
  /// @throws InvalidArgument without a plan, for another number of stages or micro-batches, for a time that is negative
  /// or not finite.
  void record(std::span<const MeasuredStage> stages);

  /// A stage of the last plan ran out of memory. First fewer micro-batches are in flight on all stages; where that does
  /// not help the stage, other cuts are planned with less memory on its device. After 64 steps, what did not fit is
  /// tried again, since another program may have used the memory, or items have become smaller. If memory runs out
  /// once more, the plan is at once what fitted before, and the next try comes after twice as many steps.
  /// @return true if plan() now has another plan for the same batch; false if nothing is left to try.
  /// @throws InvalidArgument without a plan or for a stage that it does not have.
  bool out_of_memory(std::size_t stage);

  /// The device gets no stage from the next plan on. Cuts that were given are planned anew, and an order that was given
  /// goes on without the device.
  /// @throws InvalidArgument if there is no such device, or it is the last one.
  void retire(std::size_t device);
  /// A device that was retired may get a stage again, with all of its memory, by what is known of it from before.
  /// @throws InvalidArgument if there is no such device.
  void restore(std::size_t device);
  [[nodiscard]] bool retired(std::size_t device) const;

  /// The problem as it is known now: with corrected blocks, speeds, noise and memory.
  [[nodiscard]] plan::StageProblem problem() const;
  /// The number of steps that were recorded.
  [[nodiscard]] std::int64_t steps() const noexcept;
  /// The number of changes of cuts or devices so far, whatever the reason.
  [[nodiscard]] std::int64_t move_count() const noexcept;
  /// At most the last 16 changes, oldest first.
  [[nodiscard]] const std::vector<StageMove>& recent_moves() const noexcept;

  /// In words: which stage sets the pace, how much of the step is bubble, bytes per device, what one more device or one
  /// more micro-batch would bring, and why it moved last. Plans twice, so it takes as long.
  /// `steps_before`: how many steps ran before the first plan. Numbers of steps in the text count them.
  [[nodiscard]] std::string explain(std::int64_t steps_before = 0) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace paceline::balance
