// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <paceline/engine/pipeline_step.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/schedule.hpp>

namespace paceline {

/// Threads that carry micro-batches through a pipeline, for a model that cannot be taken apart: one call computes all
/// of its stages, as the forward of a PyTorch module does, or another one on its stack. A lane runs the whole
/// micro-batch, and uses each stage's device while it has that device's turn.
///
///   auto lanes = std::make_shared<Lanes>(threads, schedule, [&](std::size_t lane, std::int64_t micro_batch) {
///     // here the lane has the turn for the forward of stage 0
///     first_stage();  lanes->advance(micro_batch);   // gives that turn back, and waits for the next: forward of stage
///     1 second_stage(); lanes->advance(micro_batch);   // backward of stage 1
///     ...
///   });
///   PipelineStep step(group, lanes, schedule, devices);
///
/// There are as many lanes as the first stage has micro-batches in flight. Lane l runs micro-batches l, l + lanes, ...
/// A body that returns early has its other turns taken and given back for it, so that no stage waits for it.
class PACELINE_API LaneThreads {
 public:
  LaneThreads();
  ~LaneThreads();
  LaneThreads(const LaneThreads&) = delete;
  LaneThreads& operator=(const LaneThreads&) = delete;
  /// The number of threads that were started. They sleep between steps.
  [[nodiscard]] std::size_t size() const noexcept;
  /// Ends the threads. Requires: no step runs.
  void close() noexcept;

 private:
  friend class Lanes;
  struct State;
  std::shared_ptr<State> state_;
};

/// See LaneThreads.
class PACELINE_API Lanes : public PipelineProgram {
 public:
  /// Carries one micro-batch through all of its actions. May throw; the action whose turn it has then fails.
  using Body = std::function<void(std::size_t lane, std::int64_t micro_batch)>;

  Lanes(LaneThreads& threads, const plan::Schedule& schedule, Body body);
  ~Lanes() override;

  [[nodiscard]] std::size_t lanes() const noexcept;
  /// For the body: gives back the turn that it has, and waits for that of the micro-batch's next action.
  /// @return that action, or none if the step ends early: then the body must return, without using a device.
  std::optional<StageAction> advance(std::int64_t micro_batch);
  /// For the body: the action whose turn it has; none before the first and after the last one.
  [[nodiscard]] std::optional<StageAction> current(std::int64_t micro_batch) const;
  /// For the caller, after PipelineStep::wait(): waits until every lane has left its body. If `between` returns false
  /// it stops waiting and returns false.
  bool wait(const DeviceGroup::Between& between = {});

  void run(const StageAction& action, Turn& turn) override;
  void give_up() noexcept override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace paceline
