// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// How a share is cut into micro-batches.
struct ChunkOptions {
  /// > 0: every micro-batch has this size but the last of a share (memory, graphs, batch statistics).
  std::int64_t fixed_size = 0;
  /// Part of the share held back for late corrections, in [0, 1); 0 means one micro-batch.
  double correction_fraction = 0.0;
  /// Smallest correction worth its fixed cost; see correction_floor().
  std::int64_t floor = 1;
  std::int64_t granularity = 1;
};

/// The smallest correction for which the fixed cost is at most `overhead` of its time, at least 1.
PACELINE_API std::int64_t correction_floor(const CostModel& model, double overhead = 0.5,
                                           std::int64_t granularity = 1);

/// The micro-batch sizes of a share of `share` items, in the order they run; they sum to `share`.
///
/// With fixed_size: equal micro-batches. Otherwise one large planned chunk, then corrections that halve
/// (factoring, Hummel, Schonberg & Flynn 1992, after guided self-scheduling, Polychronopoulos & Kuck 1987), each
/// floor * 2^k, so that few distinct sizes ever run.
PACELINE_API std::vector<std::int64_t> chunks(std::int64_t share, const ChunkOptions& options = {});

/// What is known about a device when somebody claims in the tail of a step.
struct TailDevice {
  CostModel model;
  double free_at_seconds = 0.0;   ///< when it will have finished what it holds, on the step's clock
  bool may_claim = true;          ///< it has not been told that its micro-batch is its last
};

/// How many of `remaining` unclaimed items the device `claimer`, free at its free_at_seconds, should take now.
///
/// Aims all devices at one common finish: T solves sum_i n_i(T) = remaining with n_i(T) the items that
/// device i can finish by T. The claimer takes half of its part (factoring) while that is at least 2 * floor,
/// rounded down to floor * 2^k * granularity, else all of its part. 0: others will finish the rest sooner.
PACELINE_API std::int64_t next_correction(std::int64_t remaining, std::span<const TailDevice> devices,
                                          std::int64_t claimer, std::int64_t floor, std::int64_t granularity = 1);

}  // namespace paceline::plan
