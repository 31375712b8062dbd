// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <paceline/engine/pipeline.hpp>
#include <paceline/engine/stage_log.hpp>
#include <paceline/engine/stage_planner.hpp>
#include <paceline/runtime/dtype.hpp>

#include "engine/pipeline/pipeline_memory.hpp"
#include "engine/pipeline/pipeline_run.hpp"
#include "engine/unsettled.hpp"

namespace paceline::internal {

/// BasicPipeline without the type of its elements.
class PipelineCore {
 public:
  PipelineCore(DeviceGroup group, const PipelineOptions& options, DType dtype);

  Objective step(std::int64_t batch_size, const BlockCalls& calls, double weight);
  void update(const std::function<void(std::size_t block, BlockMemory& memory, NativeStream stream)>& body);

  [[nodiscard]] BlockMemory& block(std::size_t index);
  [[nodiscard]] const PipelineBlock& sizes(std::size_t block) const { return blocks_[block]; }
  [[nodiscard]] std::size_t input_count(std::size_t block) const {
    return block == 0 ? 0 : blocks_[block - 1].output_count;
  }
  [[nodiscard]] NativeStream stream(DeviceId device) const;
  [[nodiscard]] StagePlanner& planner() noexcept { return planner_; }
  [[nodiscard]] const plan::StagePlan& plan() const noexcept { return *plan_; }
  [[nodiscard]] const PipelineRecord& last_step() const noexcept { return last_step_; }
  [[nodiscard]] const StageLog& log() const noexcept { return log_; }
  [[nodiscard]] const DeviceGroup& group() const noexcept { return group_; }

 private:
  /// A step whose times may not be known yet.
  struct Pending {
    std::shared_ptr<const plan::StagePlan> plan;
    std::shared_ptr<StepMarks> marks;
    std::vector<std::vector<ActionRecord>> record;
    std::chrono::steady_clock::time_point started{};
    bool first = false;  // with these stages
    bool measures = false;
    bool moved = false;
    const StageDevices* devices = nullptr;
    [[nodiscard]] bool settled() const { return marks->done(); }
    void settle() const;
  };

  /// The device of each stage of a plan.
  [[nodiscard]] std::vector<DeviceId> devices_of(const plan::StagePlan& plan) const;
  [[nodiscard]] std::shared_ptr<StepMarks> take_marks(const plan::StagePlan& plan);
  /// Hands on the times of the oldest steps, until at most `most` are left, and of others that are done.
  void collect(std::size_t most);
  void note(Pending& step);
  [[nodiscard]] std::vector<BlockSample> samples(const Pending& step) const;
  void stamp(Pending& step) const;
  [[noreturn]] void rethrow(const PipelineRun& run, const PipelineFailure& failure) const;
  /// Calls `body` for each stage on its device's worker. An error says `what` it was at.
  void on_stages(const char* call, const std::function<void(std::size_t stage)>& body,
                 const std::function<std::string(std::size_t stage)>& what);

  DeviceGroup group_;
  std::vector<PipelineBlock> blocks_;
  DType dtype_;
  StageDevices devices_;
  StagePlanner planner_;
  StageLog log_;
  std::shared_ptr<const plan::StagePlan> plan_;
  std::vector<std::shared_ptr<StepMarks>> marks_;
  Unsettled<std::shared_ptr<Pending>> pending_;
  PipelineMemory memory_;  // goes before the marks, when the devices have written to them for the last time
  PipelineRecord last_step_;
};

}  // namespace paceline::internal
