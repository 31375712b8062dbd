// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <paceline/engine/pipeline_step.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/dtype.hpp>

#include "comm/block_reduction.hpp"
#include "engine/pipeline/pipeline_memory.hpp"
#include "engine/pipeline/step_marks.hpp"

namespace paceline::internal {

/// BasicBlockRun without the type of its elements. Its sizes follow from the block's.
struct BlockCall {
  std::size_t block = 0;
  DeviceId device{};
  std::int64_t micro_batch = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const BlockMemory* memory = nullptr;
  std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::byte* saved = nullptr;
  std::byte* output_gradient = nullptr;
  std::byte* input_gradient = nullptr;
  NativeStream stream = nullptr;
  double* loss_sum = nullptr;
};

struct BlockCalls {
  std::function<double(const BlockCall&)> forward;
  std::function<void(const BlockCall&)> backward;
};

/// One step of a pipeline of blocks.
class PipelineRun final : public PipelineProgram {
 public:
  /// Requires: `memory` is arranged for `plan`, and lives until every worker has left. `each_block`: marks the end of
  /// each block, too.
  PipelineRun(PipelineMemory& memory, std::shared_ptr<const plan::StagePlan> plan, BlockCalls calls,
              std::shared_ptr<StepMarks> marks, bool each_block);

  void run(const StageAction& action, Turn& turn) override;
  /// After a step without failure, before commit(): takes the memory that this needs, and looks whether a device has
  /// failed. Nothing is written if it throws.
  void prepare_commit(double scale, DType dtype);
  /// For each stage on its worker or on any one thread: gradients = scale * sums.
  void commit(std::size_t stage);

  /// What bodies on the host have returned.
  [[nodiscard]] double loss() const noexcept { return loss_; }
  /// The block that the stage ran last.
  [[nodiscard]] std::size_t block(std::size_t stage) const { return progress_[stage].block; }
  [[nodiscard]] std::int64_t begin(std::int64_t micro_batch) const {
    return starts_[static_cast<std::size_t>(micro_batch)];
  }
  [[nodiscard]] std::int64_t end(std::int64_t micro_batch) const {
    return starts_[static_cast<std::size_t>(micro_batch) + 1];
  }

 private:
  /// Its stage's worker writes it.
  struct alignas(64) Progress {
    std::size_t block = 0;
    bool cleared = false;
  };

  void forward(const StageAction& action, Stage& stage, ActionMarks& marks);
  void backward(const StageAction& action, Stage& stage, ActionMarks& marks);
  void receive(const StageAction& action, std::size_t sender, StageLink& link, std::byte* to, const std::byte* from,
               std::size_t item_bytes);
  [[nodiscard]] BlockCall call(const StageAction& action, std::size_t block, const Stage& stage);

  PipelineMemory& memory_;
  StageDevices& devices_;
  std::shared_ptr<const plan::StagePlan> plan_;
  BlockCalls calls_;
  std::shared_ptr<StepMarks> marks_;
  bool each_block_;
  std::vector<std::int64_t> starts_;  // of each micro-batch, and the batch size
  std::vector<Progress> progress_;    // of each stage
  double scale_ = 1.0;
  DType dtype_ = DType::float32;
  std::vector<std::unique_ptr<BlockReduction>> sums_;  // of each stage; empty ones for GPUs
  double loss_ = 0.0;                                  // the last stage's
};

}  // namespace paceline::internal
