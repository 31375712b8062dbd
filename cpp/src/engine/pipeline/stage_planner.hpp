// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/plan/stages.hpp>

#include "engine/pipeline/block_costs.hpp"

namespace paceline::internal {

/// Whether both run the same in the same places.
[[nodiscard]] bool same_run(const plan::StagePlan& a, const plan::StagePlan& b);

/// Says what a pipeline's next step runs: a StageBalancer, and before it, if nobody knows what the blocks cost, steps
/// that measure them. Measuring steps are steps like others. They go round the devices, so that each block runs on each
/// device, first with small micro-batches and then with larger ones.
class StagePlanner {
 public:
  /// `measure`: the times in the problem are guesses.
  StagePlanner(plan::StageProblem problem, plan::StageOptions options, balance::MoveCost moves, bool measure);

  /// @throws as StageBalancer::plan
  [[nodiscard]] std::shared_ptr<const plan::StagePlan> plan(std::int64_t batch_size);
  /// Whether the next step measures blocks: it gives samples instead of timings.
  [[nodiscard]] bool measures() const noexcept { return run_ < steps_; }
  /// Whether plan() needs the samples of all measuring steps first.
  [[nodiscard]] bool awaits_samples() const noexcept { return run_ == steps_ && recorded_ < steps_; }
  /// The step of the last plan() has run. If it measures, its samples come later.
  void ran() noexcept { run_ += measures() ? 1 : 0; }
  /// Steps that have run and whose times are not known will never be recorded. Those that measured run again.
  void forget_unrecorded() noexcept { run_ = recorded_; }
  /// A measuring step's times.
  void record(const std::vector<BlockSample>& samples);
  /// The times of a step that ran `plan`. Ignored if another plan was made since then.
  void record(const plan::StagePlan& plan, std::span<const balance::StageTimings> timings);

  [[nodiscard]] bool out_of_memory(std::size_t stage);
  void retire(DeviceId device);
  void restore(DeviceId device);

  [[nodiscard]] const balance::StageBalancer& balancer() const noexcept { return *balancer_; }
  [[nodiscard]] std::string explain() const;

 private:
  [[nodiscard]] plan::StageOptions measuring_options(std::int64_t batch_size, bool in_turn) const;
  void renew(plan::StageOptions options);

  plan::StageProblem problem_;
  plan::StageOptions options_;
  balance::MoveCost moves_;
  std::vector<bool> retired_;
  std::unique_ptr<balance::StageBalancer> balancer_;
  std::shared_ptr<const plan::StagePlan> last_;
  std::vector<BlockSample> samples_;
  // Measuring steps: all of them, those that have run, and those whose samples are known.
  std::size_t steps_ = 0;
  std::size_t run_ = 0;
  std::size_t recorded_ = 0;
  std::optional<std::size_t> ready_;  // the measuring step that the balancer plans
};

}  // namespace paceline::internal
