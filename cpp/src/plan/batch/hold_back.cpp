// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/hold_back.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

#include <paceline/plan/corrections.hpp>

#include "plan/batch/monotone.hpp"
#include "refuse.hpp"

namespace paceline::plan {
HoldBackPlan plan_hold_back(std::span<const std::int64_t> shares, std::span<const CostModel> models,
                            std::span<const double> noise, std::int64_t granularity, double margin) {
  HoldBackPlan plan;
  plan.first_chunks.assign(shares.begin(), shares.end());
  plan.floor = std::max<std::int64_t>(granularity, 1);
  if (models.empty() || noise.empty()) return plan;
  if (models.size() != shares.size() || noise.size() != shares.size() || granularity < 1)
    refuse("plan_hold_back: shares, models and noise need one entry per device, and granularity at least 1.");

  double largest = 0.0;  // standard deviations of the two noisiest finishes, in seconds
  double second = 0.0;
  double fixed_seconds = 0.0;
  std::int64_t floor = std::numeric_limits<std::int64_t>::max();
  std::size_t active = 0;
  for (std::size_t d = 0; d < shares.size(); ++d) {
    if (shares[d] == 0) continue;
    ++active;
    const double deviation = noise[d] * models[d].seconds(shares[d]);
    second = std::max(second, std::min(largest, deviation));
    largest = std::max(largest, deviation);
    fixed_seconds += models[d].fixed_seconds();
    floor = std::min(floor, correction_floor(models[d], kCorrectionOverhead, granularity));
  }
  if (active < 2) return plan;
  const double late_seconds = std::hypot(largest, second) / std::sqrt(2.0 * std::numbers::pi);
  if (late_seconds <= fixed_seconds / static_cast<double>(active)) return plan;

  plan.floor = floor;
  for (std::size_t d = 0; d < shares.size(); ++d) {
    if (shares[d] == 0) continue;
    const double wanted = margin * noise[d] * static_cast<double>(shares[d]) / static_cast<double>(granularity);
    // With more than half of a share held back it would be self-scheduling and no longer a plan. Only whole grains are
    // held back. A remainder that is no multiple stays in the chunk.
    const std::int64_t held = to_count(std::ceil(wanted), shares[d] / 2 / granularity) * granularity;
    plan.first_chunks[d] = shares[d] - held;
    plan.pool += held;
  }
  if (plan.pool < plan.floor) {  // too little for one correction, so the chunks are the shares
    plan.first_chunks.assign(shares.begin(), shares.end());
    plan.pool = 0;
  }
  return plan;
}

}  // namespace paceline::plan
