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
///   const auto body = [&](std::size_t lane, std::int64_t micro_batch) {
///     first_stage();                 // with the turn for the forward of stage 0
///     lanes->advance(micro_batch);   // gives that turn back, and waits for the turn for the forward of stage 1
///     second_stage();
///     lanes->advance(micro_batch);   // now for the backward of stage 1
///     ...
///   };
///   lanes = std::make_shared<Lanes>(threads, schedule, body);
///   PipelineStep step(group, lanes, schedule, devices);
///
/// There are as many lanes as the first stage has micro-batches in flight. Without backwards there
/// is one more than stages, so that all stages are busy and one micro-batch waits. A lane runs one micro-batch after
/// another. Other turns of a body that returns early are taken and given back for it, so that no stage waits for it.
///
/// A thread belongs to one lane number for good. If a lane of an earlier step is still in its body, because a wait was
/// given up, its next micro-batch waits until it has left. After fork() the child has no such threads: there the
/// destructors do nothing.
class PACELINE_API LaneThreads {
 public:
  LaneThreads();
  ~LaneThreads();
  LaneThreads(const LaneThreads&) = delete;
  LaneThreads& operator=(const LaneThreads&) = delete;
  /// The number of threads that were started. They sleep between steps.
  [[nodiscard]] std::size_t size() const noexcept;
  /// Ends the threads. Requires: no step runs. If a lane is still in its body, or calls this, the threads are left
  /// behind; they end when they have left their bodies.
  void close() noexcept;

 private:
  friend class Lanes;
  struct State;
  std::shared_ptr<State> state_;
};

/// See LaneThreads.
class PACELINE_API Lanes : public PipelineProgram {
 public:
  /// Carries one micro-batch through all of its actions. May throw: the action whose turn it has then fails. What it
  /// throws without a turn, after the step was given up or its last turn was given back, is dropped.
  using Body = std::function<void(std::size_t lane, std::int64_t micro_batch)>;

  /// For one step of this schedule.
  /// @throws InvalidArgument as plan::check().
  Lanes(LaneThreads& threads, const plan::Schedule& schedule, Body body);
  ~Lanes() override;

  [[nodiscard]] std::size_t lanes() const noexcept;
  /// For the body: gives back the turn that it has, and waits for that of the micro-batch's next action.
  /// @return that action; none after the last one, or if the step ends early: then the body must return, without using
  /// a device.
  /// @throws InvalidArgument if there is no such micro-batch.
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
