// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include <paceline/plan/corrections.hpp>

#include "plan/batch/greedy_fill.hpp"
#include "plan/numbers.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

void require_positive(std::int64_t value, const char* what) {
  if (value < 1) refuse("{} is {}; it must be at least 1", what, value);
}

}  // namespace

std::int64_t correction_floor(const CostModel& model, double overhead, std::int64_t granularity) {
  if (!(overhead > 0.0 && overhead <= 1.0))
    refuse("overhead is {}; the fixed cost's part of a correction's time must be in (0, 1]", overhead);
  require_positive(granularity, "granularity");
  const double fixed = model.fixed_seconds();
  if (fixed == 0.0 || overhead == 1.0) return granularity;
  const double items = std::ceil(fixed * (1.0 / overhead - 1.0) / model.per_item_seconds());
  const std::int64_t largest = kMostInt64 / granularity * granularity;
  if (!(items < static_cast<double>(largest))) return largest;
  return rounded_up(std::max<std::int64_t>(static_cast<std::int64_t>(items), 1), granularity);
}

std::int64_t next_correction(std::int64_t remaining, std::span<const TailDevice> devices, std::int64_t claimer,
                             std::int64_t floor, std::int64_t granularity) {
  if (remaining < 0) refuse("remaining is {}; it cannot be negative", remaining);
  if (claimer < 0 || static_cast<std::size_t>(claimer) >= devices.size())
    refuse("claimer is {}, but there are {} devices", claimer, devices.size());
  require_positive(floor, "floor");
  require_positive(granularity, "granularity");
  const TailDevice& asking = devices[static_cast<std::size_t>(claimer)];
  if (remaining == 0 || !asking.may_claim) return 0;

  // Times count from the first device that is free, since the level search starts at zero. A common shift changes no
  // part.
  double start = asking.free_at_seconds;
  for (const TailDevice& device : devices) {
    if (!std::isfinite(device.free_at_seconds))
      refuse("free_at_seconds is {}; it must be finite", device.free_at_seconds);
    if (device.may_claim) start = std::min(start, device.free_at_seconds);
  }
  const std::int64_t grains = remaining / granularity + (remaining % granularity != 0 ? 1 : 0);
  // This runs for every claim in the tail, so only a thread's first claims need the heap.
  thread_local std::vector<GrainRange> ranges;
  thread_local std::vector<std::int64_t> parts;
  ranges.resize(devices.size());
  parts.resize(devices.size());
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const TailDevice& device = devices[i];
    ranges[i] = {{device.model, device.free_at_seconds - start, granularity, 0}, 0, device.may_claim ? grains : 0};
  }
  fill_greedily(ranges, grains, parts);
  const std::int64_t part =
      std::min(saturating_multiply(parts[static_cast<std::size_t>(claimer)], granularity), remaining);
  const std::int64_t unit = rounded_up(floor, granularity);  // the smallest correction that may run
  // One floor serves the whole box. A device with a higher fixed cost would lose more by smaller pieces than it gains.
  const std::int64_t own_unit = std::max(unit, correction_floor(asking.model, kCorrectionOverhead, granularity));
  const std::int64_t half = part / 2;
  if (half / 2 < own_unit) return part;
  return unit * static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(half / unit)));
}

}  // namespace paceline::plan
