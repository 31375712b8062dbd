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
/// claimer takes half of its part (factoring: Hummel, Schonberg & Flynn, Communications of the ACM 35(8), 1992) while
/// that is at least twice the larger of `floor` and its own correction_floor, rounded down to unit * 2^k with unit the
/// floor rounded up to the granularity, else all of its part. 0: others will finish the rest sooner, or it may not
/// claim.
///
/// While devices that may claim ask whenever they are free, everything is handed out: the last one left is never told
/// 0. Sizes are unit * 2^k, or a device's last, below four times the larger floor. Pure; no allocation up to 16
/// devices.
PACELINE_API std::int64_t next_correction(std::int64_t remaining, std::span<const TailDevice> devices,
                                          std::int64_t claimer, std::int64_t floor, std::int64_t granularity = 1);

}  // namespace paceline::plan
