// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/stages.hpp>

namespace paceline {

/// How long a block took on a device with one micro-batch.
struct BlockSample {
  std::size_t block = 0;
  std::size_t device = 0;  ///< its place in the problem's devices
  bool backward = false;
  std::int64_t items = 0;
  double seconds = 0.0;
};

/// Says what a pipeline's next step runs: a StageBalancer, and before it, if nobody knows what the blocks cost, steps
/// that measure them. Measuring steps are steps like others. The first ones go round the devices, each by one further,
/// so that every device runs blocks that a neighbour has run. The last one has micro-batches of another size, which
/// tells what of a time does not depend on the items; a number of micro-batches that was given leaves it out.
///
/// Trainers in C++ and Python are built on it. Not thread-safe.
class PACELINE_API StagePlanner {
 public:
  /// `measure`: the times in the problem are guesses.
  /// @throws as StageBalancer
  explicit StagePlanner(plan::StageProblem problem, plan::StageOptions options = {}, balance::MoveCost moves = {},
                        bool measure = true);

  /// @throws as StageBalancer::plan
  [[nodiscard]] std::shared_ptr<const plan::StagePlan> plan(std::int64_t batch_size);
  /// What a prediction of so many items runs: the stages of the last plan, in at least as many micro-batches, of at
  /// least `least_items` items and none larger than in training. Memory for training limits it before the first step
  /// only.
  [[nodiscard]] std::shared_ptr<const plan::StagePlan> predict(std::int64_t items, std::int64_t least_items = 1);
  /// Whether the next step measures blocks: it gives samples instead of timings.
  [[nodiscard]] bool measures() const noexcept { return run_ < steps_; }
  /// Whether plan() needs the samples of all measuring steps first.
  [[nodiscard]] bool awaits_samples() const noexcept { return run_ == steps_ && recorded_ < steps_; }
  /// How many measuring steps were recorded, since blocks are measured.
  [[nodiscard]] std::size_t recorded() const noexcept { return recorded_; }
  /// The step of the last plan() has run. If it measures, its samples come later.
  void ran() noexcept { run_ += measures() ? 1 : 0; }
  /// Steps that have run and whose times are not known will never be recorded. Those that measured run again.
  void forget_unrecorded() noexcept { run_ = recorded_; }
  /// A measuring step's times, of any of its micro-batches. Those of its middle size count. `classes`: as fit_costs.
  void record(std::vector<BlockSample> samples, std::span<const std::size_t> classes = {});
  /// The times of a step that ran `plan`. Ignored if another plan was made since then.
  void record(const plan::StagePlan& plan, std::span<const balance::MeasuredStage> timings);

  /// As StageBalancer::set_least_items.
  void set_least_items(std::int64_t items);
  /// What blocks take of memory, of which the times are not read.
  /// @throws InvalidArgument for another number of blocks.
  void set_bytes(const std::vector<plan::BlockCost>& blocks);
  /// From the next balancer on, after blocks were measured or told.
  void set_link(plan::LinkCost link) noexcept { problem_.link = link; }
  /// Nothing that was measured of blocks holds any more.
  void measure_again();
  /// Plan all steps from now on with these costs of blocks and speeds of devices.
  void know(std::vector<plan::BlockCost> blocks, std::span<const double> speeds);
  /// The problem with what was measured at first, or told.
  [[nodiscard]] const plan::StageProblem& known() const noexcept { return problem_; }

  /// A stage of the last plan ran out of memory. While blocks are measured, micro-batches become smaller if their
  /// number is not given; else, and then, as StageBalancer::out_of_memory.
  /// @return whether plan() now has another plan for the same batch.
  [[nodiscard]] bool out_of_memory(std::size_t stage);
  /// A prediction with this largest micro-batch ran out of memory. @return whether predict() now has smaller ones.
  [[nodiscard]] bool out_of_memory_predicting(std::int64_t items) noexcept;
  /// By its place in the problem's devices.
  void retire(std::size_t device);
  void restore(std::size_t device);

  /// Of the last plan; while blocks are measured it is not the one that counts.
  [[nodiscard]] const balance::StageBalancer& balancer() const noexcept { return *balancer_; }
  /// The plan of the next step if plan() was called, else of the last one; null before the first.
  [[nodiscard]] const std::shared_ptr<const plan::StagePlan>& last() const noexcept { return last_; }
  /// As StageBalancer::move_count and recent_moves, over all steps. Changes while blocks are measured are no moves.
  [[nodiscard]] std::int64_t move_count() const noexcept;
  [[nodiscard]] std::vector<balance::StageMove> recent_moves() const;
  [[nodiscard]] std::string explain() const;

 private:
  [[nodiscard]] plan::StageOptions measuring_options(std::int64_t batch_size, bool in_turn) const;
  [[nodiscard]] std::unique_ptr<balance::StageBalancer> made(plan::StageOptions options) const;
  /// Before another balancer takes over.
  void keep_moves();

  plan::StageProblem problem_;
  plan::StageOptions options_;
  balance::MoveCost moves_;
  std::vector<bool> retired_;
  std::unique_ptr<balance::StageBalancer> balancer_;
  std::shared_ptr<const plan::StagePlan> last_;
  std::vector<BlockSample> samples_;
  std::int64_t least_items_ = 1;
  // Measuring steps: all of them, those that have run, and those whose samples are known.
  std::size_t steps_ = 0;
  std::size_t run_ = 0;
  std::size_t recorded_ = 0;
  std::optional<std::pair<std::size_t, std::int64_t>> ready_;  // the measuring step and batch that the balancer plans
  std::int64_t micro_batches_;                                 // of a step that measures
  bool short_of_memory_ = false;                               // so that no other step that measures has larger ones
  bool one_size_ = false;  // of all micro-batches that were measured, since the batch was too small
  std::optional<std::int64_t> most_predicted_;  // items of a micro-batch, after memory ran out
  std::int64_t steps_recorded_ = 0;
  std::int64_t steps_before_ = 0;  // the present balancer
  std::int64_t moves_before_ = 0;  // those of earlier balancers
  std::vector<balance::StageMove> recent_before_;
};

}  // namespace paceline
