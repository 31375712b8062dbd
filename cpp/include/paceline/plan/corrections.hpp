// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// The part of a correction's time that its fixed cost may take. A quarter:
/// smaller corrections cost more in fixed time than they save in waiting, larger ones no longer even out the finish.
inline constexpr double kCorrectionOverhead = 0.25;

/// The smallest correction for which the fixed cost is at most `overhead` of its time, at least 1, rounded up to a
/// multiple of `granularity`. The largest int64 multiple where the time does not grow with the size: no correction is
/// worth it then.
PACELINE_API std::int64_t correction_floor(const CostModel& model, double overhead = kCorrectionOverhead,
                                           std::int64_t granularity = 1);

/// How many of `left` items a piece should take if it wants `wanted` items and no piece may have fewer than `least`.
/// Returns the number nearest to `wanted` for which neither the piece nor the rest is smaller than `least`; between two
/// equally near numbers, the smaller one. Returns `left` if there is no such number.
[[nodiscard]] constexpr std::int64_t fitting_piece(std::int64_t wanted, std::int64_t left, std::int64_t least) {
  if (wanted >= left) return left;
  if (left / 2 < least) return left;  // twice the least could overflow
  return wanted < least ? least : wanted < left - least ? wanted : left - least;
}

/// What is known about a device when a device asks for a correction.
struct TailDevice {
  CostModel model = {};
  double free_at_seconds = 0.0;  ///< when it will have finished everything it holds, on the step's clock
  bool may_claim = true;         ///< false once it has got its last micro-batch
};

/// How many of `remaining` unclaimed items the device `claimer`, free at its free_at_seconds, should take now.
///
/// All devices that may claim aim at one common finish T. T solves sum_i n_i(T) = remaining, where n_i(T) is the number
/// of items that device i can finish by T, its fixed cost included. A device that could not finish one grain by T has
/// no part. The claimer takes half of its part (factoring: Hummel, Schonberg & Flynn, Communications of the ACM 35(8),
/// 1992) if this half is at least twice the larger of `floor` and its own correction_floor. The half is rounded down to
/// unit * 2^k, where the unit is the floor rounded up to the granularity. Otherwise the claimer takes all of its part.
/// The result is 0 if others will finish the rest sooner, or if the claimer may not claim.
///
/// If the devices that may claim ask whenever they are free, everything is handed out: the last of them never gets 0.
/// Sizes are unit * 2^k; only a device's last correction has another size, below four times the larger floor. Pure.
/// Memory is allocated only in a thread's first calls.
PACELINE_API std::int64_t next_correction(std::int64_t remaining, std::span<const TailDevice> devices,
                                          std::int64_t claimer, std::int64_t floor, std::int64_t granularity = 1);

}  // namespace paceline::plan
