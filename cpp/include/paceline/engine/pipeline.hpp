// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/objective.hpp>
#include <paceline/engine/pipeline_step.hpp>
#include <paceline/engine/stage_log.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/native_stream.hpp>

namespace paceline {

/// One of the blocks in a row that a model is made of. Counts are in elements of the pipeline's type.
struct PipelineBlock {
  std::size_t parameter_count = 0;
  std::size_t output_count = 0;  ///< per item: what it hands to the next block; 0 for the last block
  std::size_t saved_count = 0;   ///< per item: what it keeps from forward to backward, beside its input and output
  std::size_t state_count = 0;   ///< what the optimizer keeps of it; it moves with the block
};

/// What a body gets: one block and one micro-batch, with the memory of the block's device.
template <class T>
struct BasicBlockRun {
  std::size_t block = 0;
  DeviceId device{};
  std::int64_t micro_batch = 0;
  std::int64_t begin = 0;  ///< its items of the batch are [begin, end)
  std::int64_t end = 0;
  std::span<const T> parameters;
  std::span<const T> input;  ///< [items, output_count of the block before]; empty for the first block
  std::span<T> output;       ///< [items, output_count]; the forward writes it, the backward may read it
  std::span<T> saved;        ///< [items, saved_count]; the forward writes it, the backward reads it
  // For the backward only.
  std::span<const T> output_gradient{};  ///< like output; empty for the last block, which computes the loss
  std::span<T> input_gradient{};         ///< like input; the backward writes all of it
  std::span<T> gradients{};              ///< like parameters; the backward adds to it
  NativeStream stream = nullptr;         ///< on a GPU the cudaStream_t to enqueue everything on; null on the host
  /// On a GPU, a sum in the GPU's memory that the last block may add losses to, beside those that it returns. Null on
  /// the host.
  double* loss_sum = nullptr;

  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
};

/// What the update of one block gets.
template <class T>
struct BasicBlockUpdate {
  std::size_t block = 0;
  DeviceId device{};
  std::span<T> parameters;
  std::span<const T> gradients;
  std::span<T> state;
  NativeStream stream = nullptr;  ///< as BasicBlockRun::stream
};

struct PipelineOptions {
  std::vector<PipelineBlock> blocks{};
  std::int64_t batch_size = 1;  ///< items of a usual step; the first cuts are planned for it
  /// What each block takes, in seconds on a device of speed 1. Only times and workspace are read; the other bytes
  /// follow from the counts. Empty: the first steps measure the blocks, on two devices each and in two sizes.
  std::vector<plan::BlockCost> costs{};
  std::vector<double> speeds{};  ///< of each device, relative; empty: equal until they are measured
  /// The most bytes that each device may hold, for its blocks and for the micro-batches in flight. 0 or an empty list:
  /// no limit. With a limit or without, a step whose body throws OutOfMemory or std::bad_alloc, or that gets no memory,
  /// runs again: first with fewer micro-batches in flight (smaller ones while blocks are measured), then with other
  /// cuts.
  std::vector<std::int64_t> memory_limits{};
  plan::LinkCost link{};  ///< between two memory spaces
  /// What is not to be planned: cuts, the order of the devices, the number of micro-batches, the kind of schedule.
  plan::StageOptions stages{};
  balance::MoveCost moves{};
  /// GPUs only: the longest time for enqueued work. Work that takes longer counts as a hang: the step throws Timeout,
  /// and later steps throw DeviceLost.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
};

/// How a step of a pipeline ran.
struct PipelineRecord {
  plan::StagePlan plan;                            ///< `seconds` is the predicted step
  std::vector<std::vector<ActionRecord>> actions;  ///< per stage in order; on GPUs by the devices' clocks
  double step_seconds = 0.0;  ///< from handing the step to the workers to the end of the last action
};

/// Trains a model that is cut into stages over several devices, by callables.
///
/// The callables are given per *block*, and a stage runs its blocks in a row. So the cuts between stages can move,
/// which callables per stage would forbid. Blocks form a chain: each one reads only the output of the block before. The
/// first block reads the batch itself, and the last block computes the loss.
///
///   paceline::Pipeline trainer{group, {.blocks = blocks, .batch_size = 64}};
///   paceline::Objective loss = trainer.step(64,
///       [&](const paceline::BlockRun& run) { return forward(run); },       // writes run.output and run.saved
///       [&](const paceline::BlockRun& run) { backward(run); });            // writes run.input_gradient, adds to
///                                                                          // run.gradients
///   trainer.update([&](const paceline::BlockUpdate& u) { ... u.parameters -= rate * u.gradients ... });
///
/// The objective is (sum over items of w_k * l_k) / W with W the sum of the weights (the batch size by default). The
/// forward of the last block returns the plain sum of its items' losses, w_k included; other blocks return 0. The
/// backward adds the gradient of that sum. The library divides once by W. Every block adds its micro-batches up in the
/// order of the schedule, which is their own order, on one device at a time. So the result is that of one device that
/// accumulates the same micro-batches, to the bit, wherever the cuts are.
///
/// Memory: the library owns parameters, gradients and optimizer state of each block, in the memory of its stage's
/// device, and the activations of the micro-batches in flight. Within one memory space (host devices, parts of one GPU)
/// a stage reads its neighbour's output where it is, and a block moves without a copy. From one memory space to another
/// data is copied. There is a place for each micro-batch in flight on both sides, so a copy waits for no later work.
///
/// GPUs: step() returns when everything is enqueued, at most two steps ahead of the GPUs. The next stage's stream waits
/// for an event behind the work and the copy of the stage before; no thread waits, but that of a host device for data
/// from a GPU. The Objective waits when it is read. parameters(), gradients() and state() belong to stream().
///
/// Planning: balance::StageBalancer decides about cuts, order, micro-batches and depth before each step, by the
/// measured times. Moves happen between steps.
///
/// Threads: one call at a time. Bodies run on the workers, concurrently for different stages. A body that throws ends
/// the step, unless memory ran out and something is left to try: gradients() stay as they were, the error names block,
/// stage, device and items, and the next step works.
template <class T>
class PACELINE_API BasicPipeline {
 public:
  using Run = BasicBlockRun<T>;
  using Update = BasicBlockUpdate<T>;
  using Forward = std::function<double(const Run&)>;
  using Backward = std::function<void(const Run&)>;

  /// Parameters, gradients and states are zero.
  /// @throws InvalidArgument for options that do not fit the group or each other; OutOfMemory if no plan fits.
  BasicPipeline(DeviceGroup group, PipelineOptions options);
  ~BasicPipeline();
  BasicPipeline(const BasicPipeline&) = delete;
  BasicPipeline& operator=(const BasicPipeline&) = delete;

  /// One step over `batch_size` items of total weight `total_weight` (by default the batch size). Overwrites the
  /// gradients.
  /// @return the objective.
  /// @throws InvalidArgument if batch_size < 1, or the weight is not positive and finite; if a body threw, an error of
  /// its type that holds its own exception (as Step::rethrow_failure). A failure of a GPU that shows later is thrown
  /// when the objective is read, or by the step that finds it.
  Objective step(std::int64_t batch_size, const Forward& forward, const Backward& backward,
                 std::optional<double> total_weight = {});

  /// Calls `body` for each block, on the worker of its stage: in order within a stage, at the same time for different
  /// stages. @throws what step() would throw; other blocks may have been updated.
  void update(const std::function<void(const Update&)>& body);

  /// Memory of the block's device. It stays where it is until a step moves the block to another memory space.
  [[nodiscard]] std::span<T> parameters(std::size_t block);
  /// Of the last successful step, already divided by W.
  [[nodiscard]] std::span<T> gradients(std::size_t block);
  [[nodiscard]] std::span<T> state(std::size_t block);
  /// On a GPU the cudaStream_t that the block's memory belongs to; null on the host.
  [[nodiscard]] NativeStream stream(std::size_t block) const;

  /// From the next step on the device with this name has no stage, until restore().
  /// @throws InvalidArgument if the group has no such device, or it is the last one that works.
  void retire(std::string_view device);
  void restore(std::string_view device);

  /// What the last step ran, or, before it, what the first one will run.
  [[nodiscard]] const plan::StagePlan& plan() const noexcept;
  /// Whether the next step measures blocks.
  [[nodiscard]] bool measuring() const noexcept;
  /// The last step whose times are known: on GPUs it may be two steps ago. Empty before that.
  [[nodiscard]] const PipelineRecord& last_step() const noexcept;
  /// Cuts and devices that changed; see StageBalancer::recent_moves. While blocks are measured there are none.
  [[nodiscard]] std::vector<balance::StageMove> recent_moves() const;
  /// Figures, events and history of the steps whose times are known.
  [[nodiscard]] const StageLog& log() const noexcept;
  [[nodiscard]] std::string explain() const;
  [[nodiscard]] const DeviceGroup& group() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

extern template class BasicPipeline<float>;
extern template class BasicPipeline<double>;

using BlockRun = BasicBlockRun<float>;
using BlockUpdate = BasicBlockUpdate<float>;
using Pipeline = BasicPipeline<float>;

}  // namespace paceline
