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

/// The part of a correction's time that its fixed cost may take. A quarter:
/// smaller corrections cost more in fixed time than they save in waiting, larger ones no longer even out the finish.
inline constexpr double kCorrectionOverhead = 0.25;

/// The smallest correction for which the fixed cost is at most `overhead` of its time, at least 1, rounded up to a
/// multiple of `granularity`. Where the time does not grow with the size no correction is worth it: the largest int64
/// multiple.
PACELINE_API std::int64_t correction_floor(const CostModel& model, double overhead = kCorrectionOverhead,
                                           std::int64_t granularity = 1);

/// The micro-batch sizes of a share of `share` items, in the order they run; they sum to `share`. None for a share of
/// 0.
///
/// With fixed_size: equal micro-batches, the last one smaller if need be. Otherwise one large planned chunk, then
/// corrections that halve: each is unit * 2^k, where unit is the floor rounded up to the granularity, and about half of
/// what is left. Handing out a part of what is left, so that pieces shrink towards the end, is guided self-scheduling
/// (Polychronopoulos & Kuck, IEEE Transactions on Computers 36(12), 1987); half of it a round is factoring (Hummel,
/// Schonberg & Flynn, Communications of the ACM 35(8), 1992); a planned part by speed first is weighted factoring
/// (Hummel, Schmidt, Uma & Wein, SPAA 1996).
///
/// At most 2 + log2(held back / unit) distinct sizes; what is no multiple of the unit goes into the planned chunk.
PACELINE_API std::vector<std::int64_t> chunks(std::int64_t share, const ChunkOptions& options = {});

/// How many of `left` items a piece takes that should have `wanted`: the nearest number for which neither it nor what
/// it leaves is smaller than `least`, of two the smaller one. All of them where there is none: then fewer than `least`
/// are left, or fewer than twice that.
[[nodiscard]] constexpr std::int64_t fitting_piece(std::int64_t wanted, std::int64_t left, std::int64_t least) {
  if (wanted >= left) return left;
  if (left < 2 * least) return left;
  return wanted < least ? least : wanted < left - least ? wanted : left - least;
}

/// What is known about a device when somebody claims in the tail of a step.
struct TailDevice {
  CostModel model = {};
  double free_at_seconds = 0.0;  ///< when it will have finished what it holds, on the step's clock
  bool may_claim = true;         ///< it has not been told that its micro-batch is its last
};

/// How many of `remaining` unclaimed items the device `claimer`, free at its free_at_seconds, should take now.
///
/// Aims all devices that may claim at one common finish: T solves sum_i n_i(T) = remaining with n_i(T) the items that
/// device i can finish by T, its fixed cost included: a device that could not finish a grain by then has no part. The
/// claimer takes half of its part (factoring, see chunks) while that is at least twice the larger of `floor` and its
/// own correction_floor, rounded down to unit * 2^k with unit the floor rounded up to the granularity, else all of its
/// part. 0: others will finish the rest sooner, or it may not claim.
///
/// While devices that may claim ask whenever they are free, everything is handed out: the last one left is never told
/// 0. Sizes are unit * 2^k, or a device's last, below four times the larger floor. Pure; no allocation up to 16
/// devices.
PACELINE_API std::int64_t next_correction(std::int64_t remaining, std::span<const TailDevice> devices,
                                          std::int64_t claimer, std::int64_t floor, std::int64_t granularity = 1);

}  // namespace paceline::plan
