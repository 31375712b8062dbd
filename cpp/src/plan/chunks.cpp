// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include <paceline/error.hpp>
#include <paceline/plan/chunks.hpp>

#include "water_level.hpp"

namespace paceline::plan {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

void require_positive(std::int64_t value, const char* what) {
  if (value < 1) throw InvalidArgument(fmt::format("{} is {}; it must be at least 1", what, value));
}

// The smallest correction that may run: the floor as a multiple of the granularity.
std::int64_t unit_of(std::int64_t floor, std::int64_t granularity) {
  const std::int64_t rest = floor % granularity;
  if (rest == 0) return floor;
  const std::int64_t more = granularity - rest;
  return floor > kNever - more ? floor - rest : floor + more;
}

// The largest unit * 2^k that is at most `items`, which is at least one unit.
std::int64_t doubled_unit(std::int64_t items, std::int64_t unit) {
  return unit * static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(items / unit)));
}

}  // namespace

std::int64_t correction_floor(const CostModel& model, double overhead, std::int64_t granularity) {
  if (!(overhead > 0.0 && overhead <= 1.0)) {
    throw InvalidArgument(
        fmt::format("overhead is {}; the fixed cost's part of a correction's time must be in (0, 1]", overhead));
  }
  require_positive(granularity, "granularity");
  // The shortest time worth it: the floor is the first size that takes so long.
  const double fixed = model.fixed_seconds();
  const auto too_short = [&](std::int64_t items) { return model.seconds(items) * overhead < fixed; };
  if (!too_short(1)) return granularity;
  std::int64_t high = 2;
  while (high < kNever / 2 && too_short(high)) high *= 2;
  const std::int64_t largest = kNever / granularity * granularity;
  if (too_short(high)) return largest;
  std::int64_t low = high / 2;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (too_short(middle) ? low : high) = middle;
  }
  return unit_of(high, granularity);
}

std::vector<std::int64_t> chunks(std::int64_t share, const ChunkOptions& options) {
  if (share < 0) throw InvalidArgument(fmt::format("share is {}; it cannot be negative", share));
  if (options.fixed_size < 0)
    throw InvalidArgument(fmt::format("fixed_size is {}; it cannot be negative", options.fixed_size));
  require_positive(options.floor, "floor");
  require_positive(options.granularity, "granularity");
  if (!(options.correction_fraction >= 0.0 && options.correction_fraction < 1.0)) {
    throw InvalidArgument(fmt::format("correction_fraction is {}; it must be in [0, 1)", options.correction_fraction));
  }
  std::vector<std::int64_t> sizes;
  if (share == 0) return sizes;
  if (options.fixed_size > 0) {
    if (options.fixed_size % options.granularity != 0) {
      throw InvalidArgument(fmt::format("fixed_size {} is not a multiple of the granularity {}", options.fixed_size,
                                        options.granularity));
    }
    sizes.assign(static_cast<std::size_t>(share / options.fixed_size), options.fixed_size);
    if (share % options.fixed_size != 0) sizes.push_back(share % options.fixed_size);
    return sizes;
  }
  const std::int64_t unit = unit_of(options.floor, options.granularity);
  const double wanted = static_cast<double>(share) * options.correction_fraction;
  // At least one item stays in the planned chunk, which also takes what is no multiple of the unit.
  std::int64_t held = std::min(detail::to_count(wanted, share), share - 1) / unit * unit;
  sizes.push_back(share - held);
  while (held > 0) {
    sizes.push_back(doubled_unit(std::max(held / 2, unit), unit));
    held -= sizes.back();
  }
  return sizes;
}

std::int64_t next_correction(std::int64_t remaining, std::span<const TailDevice> devices, std::int64_t claimer,
                             std::int64_t floor, std::int64_t granularity) {
  if (remaining < 0) throw InvalidArgument(fmt::format("remaining is {}; it cannot be negative", remaining));
  if (claimer < 0 || static_cast<std::size_t>(claimer) >= devices.size()) {
    throw InvalidArgument(fmt::format("claimer is {}, but there are {} devices", claimer, devices.size()));
  }
  require_positive(floor, "floor");
  require_positive(granularity, "granularity");
  const TailDevice& asking = devices[static_cast<std::size_t>(claimer)];
  if (remaining == 0 || !asking.may_claim) return 0;

  // Seconds from the first device that is free: a common shift changes no part, and the level search starts at zero.
  double start = asking.free_at_seconds;
  for (const TailDevice& device : devices) {
    if (!std::isfinite(device.free_at_seconds)) {
      throw InvalidArgument(fmt::format("free_at_seconds is {}; it must be finite", device.free_at_seconds));
    }
    if (device.may_claim) start = std::min(start, device.free_at_seconds);
  }
  const std::int64_t grains = remaining / granularity + (remaining % granularity != 0 ? 1 : 0);
  // Asked for on every claim in the tail: boxes of usual size need no heap.
  std::array<detail::BoundedLane, 16> near_lanes;
  std::array<std::int64_t, 16> near_parts{};
  std::vector<detail::BoundedLane> far_lanes;
  std::vector<std::int64_t> far_parts;
  std::span<detail::BoundedLane> lanes(near_lanes.data(), std::min(devices.size(), near_lanes.size()));
  std::span<std::int64_t> parts(near_parts.data(), lanes.size());
  if (devices.size() > near_lanes.size()) {
    far_lanes.resize(devices.size());
    far_parts.resize(devices.size());
    lanes = far_lanes;
    parts = far_parts;
  }
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const TailDevice& device = devices[i];
    lanes[i] = {{device.model, device.free_at_seconds - start, granularity, 0}, 0, device.may_claim ? grains : 0};
  }
  detail::fill_to_level(lanes, grains, parts);
  const std::int64_t part = std::min(parts[static_cast<std::size_t>(claimer)] * granularity, remaining);
  const std::int64_t unit = unit_of(floor, granularity);
  // One floor serves a whole box; a device whose fixed cost is higher would lose more to smaller pieces than they can
  // win back.
  const std::int64_t own_unit = std::max(unit, correction_floor(asking.model, kCorrectionOverhead, granularity));
  const std::int64_t half = part / 2;
  return half / 2 >= own_unit ? doubled_unit(half, unit) : part;
}

}  // namespace paceline::plan
