// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>

namespace paceline::plan {

/// What one block costs: one of the layers in a row between which a model may be cut. Seconds are on a device of speed
/// 1. What comes before the first block (an embedding) belongs to the first block, and what comes after the last one (a
/// head, its logits, the loss) belongs to the last block.
struct BlockCost {
  double forward_fixed = 0.0;     ///< seconds of a micro-batch whatever its size
  double forward_per_item = 0.0;  ///< seconds
  double backward_fixed = 0.0;
  double backward_per_item = 0.0;
  std::int64_t parameter_bytes = 0;           ///< parameters, their gradients and the optimizer's state
  std::int64_t saved_bytes_per_item = 0;      ///< what autograd keeps of it from forward to backward
  std::int64_t boundary_bytes_per_item = 0;   ///< its input, which is sent if a stage begins with it
  std::int64_t workspace_bytes_per_item = 0;  ///< what it needs only while it runs
  /// Of parameter_bytes: the parameters themselves and their gradients; the rest is the optimizer's state. Both 0: a
  /// quarter each, as with Adam in single precision.
  std::int64_t weight_bytes = 0;
  std::int64_t gradient_bytes = 0;
};

/// One device, as far as a pipeline is concerned.
struct StageDevice {
  std::string name{};
  double speed = 1.0;  ///< 2: blocks take half of the time
  double noise = 0.0;  ///< relative standard deviation of the time of an action
  std::int64_t memory_bytes = kUnlimitedBytes;
  std::size_t memory_space = 0;  ///< devices of one memory space send nothing to each other, and share tied parameters
  static constexpr std::int64_t kUnlimitedBytes = INT64_MAX;
};

/// How long it takes to send n bytes from one memory space to another: latency + n / bandwidth.
struct LinkCost {
  double latency_seconds = 0.0;
  double bytes_per_second = 0.0;  ///< 0: bytes take no time
};

struct StageProblem {
  std::vector<BlockCost> blocks;
  std::vector<StageDevice> devices;
  std::int64_t batch_size = 1;  ///< items of a step
  LinkCost link{};              ///< between any two memory spaces
  /// Bytes of parameters that the first and the last block share; the parameter_bytes of both blocks include them. If
  /// both blocks lie in one memory space, only the first one's device holds them.
  std::int64_t tied_bytes = 0;
};

struct StageOptions {
  /// How many micro-batches; empty: the planner chooses among 1 to batch_size.
  std::optional<std::int64_t> micro_batches{};
  /// First blocks of the stages, beginning with 0, in place of planned cuts; empty: planned.
  std::vector<std::size_t> cuts{};
  /// The devices of the stages, in order, in place of a planned order; empty: planned, and devices may be left out.
  std::vector<std::size_t> order{};
  /// Which kinds of schedules may be chosen.
  enum class Kind : std::uint8_t { automatic, gpipe, one_f_one_b } schedule = Kind::automatic;
  /// The most micro-batches in flight on any stage; 0: no limit but memory. After memory has run out it is lowered.
  std::int64_t most_in_flight = 0;
  /// Plans whose time is within this part of the best count as equal. Among these, the one that moves the fewest bytes
  /// from `previous` wins.
  double indifference = 0.0;
  /// First blocks and devices of the present stages; empty: none. A number that is no device's stands for one that is
  /// gone.
  std::vector<std::size_t> previous_cuts{};
  std::vector<std::size_t> previous_order{};
};

/// A cut model on devices, with what will run.
struct StagePlan {
  std::vector<std::size_t> cuts;    ///< the first block of each stage; cuts[0] is 0
  std::vector<std::size_t> order;   ///< the device of each stage
  std::vector<std::int64_t> sizes;  ///< items of each micro-batch, larger ones first; they differ by at most one
  Schedule schedule;
  std::vector<StageTimes> times;    ///< of a micro-batch of the largest size
  std::vector<std::int64_t> bytes;  ///< per stage, what its device needs
  double seconds = 0.0;             ///< of a step, expected with noise
  double ideal_seconds = 0.0;       ///< the work of the step over the sum of the speeds of all devices
  /// A time that no schedule of these stages beats: max over stages of (their work in all micro-batches, + what the
  /// first micro-batch takes to get there from stage 0, and the last one to get back).
  double bound_seconds = 0.0;
  std::int64_t moved_bytes = 0;  ///< parameter_bytes that are in another memory space than in `previous`
};

/// Cuts a model into stages of neighbouring blocks and gives each to a device, in any order of the devices, so that a
/// step takes as little time as possible while every stage fits its device.
///
/// The step is the recurrence (pipeline_times), or its mean with noise (expected_seconds). Memory of stage i: its
/// parameter bytes, + in_flight * its saved bytes, + in_flight * its boundary (if it is not the first), + the largest
/// workspace of its blocks. The number of micro-batches, the warm-up of each stage, and the devices that are left out
/// because they do not pay, are part of the plan.
///
/// @throws InvalidArgument for numbers that make no sense; OutOfMemory if no plan fits, naming the device that comes
/// closest, the bytes that it has and the bytes that it would need, and what would help.
[[nodiscard]] PACELINE_API StagePlan plan_stages(const StageProblem& problem, const StageOptions& options = {});

/// The same plan for given cuts, order, micro-batches and warm-up, without a search. For searches, tests and reports.
/// @throws as plan_stages()
[[nodiscard]] PACELINE_API StagePlan evaluate_stages(const StageProblem& problem, std::span<const std::size_t> cuts,
                                                     std::span<const std::size_t> order, std::int64_t micro_batches,
                                                     const Schedule& schedule);

}  // namespace paceline::plan
