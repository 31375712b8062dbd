// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <paceline/plan/split.hpp>

#include "plan/batch/split_problem.hpp"
#include "plan/numbers.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

// With this limit sums over thousands of devices do not overflow, and every count is exact as a double.
constexpr std::int64_t kLargestBatch = std::int64_t{1} << 50;

void require_size(std::size_t size, std::size_t wanted, const char* what, const char* unit) {
  require(size == 0 || size == wanted, "{} has {} where {} are needed ({}), or none", what,
          plural(size, "entry", "entries"), wanted, unit);
}

void require_seconds(double seconds, const char* what, std::size_t i) {
  require(std::isfinite(seconds) && seconds >= 0.0, "{} at {} is {}; it must be finite and not negative", what, i,
          seconds);
}

void validate(std::int64_t batch_size, std::span<const CostModel> models, const SplitOptions& options) {
  require(!models.empty(), "a batch cannot be split over no devices; pass one cost model per device");
  require(batch_size >= 0 && batch_size <= kLargestBatch, "batch_size is {}; it must be from 0 to {}", batch_size,
          kLargestBatch);
  require(options.granularity >= 1, "granularity is {}; shares are multiples of it, so it must be at least 1",
          options.granularity);
  require_size(options.limits.size(), models.size(), "limits", "one per device");
  require_size(options.previous.size(), models.size(), "previous", "one per device");
  require_size(options.reduction_seconds.size(), models.size() + 1, "reduction_seconds",
               "one per number of devices, from 0");
  for (std::size_t i = 0; i < options.limits.size(); ++i) {
    const ShareLimits& limits = options.limits[i];
    require(limits.minimum >= 0 && limits.maximum >= limits.minimum,
            "device {} has minimum {} and maximum {}; 0 <= minimum <= maximum must hold", i, limits.minimum,
            limits.maximum);
    require_seconds(limits.startup_seconds, "startup_seconds", i);
  }
  for (std::size_t i = 0; i < options.previous.size(); ++i) {
    require(options.previous[i] >= 0, "previous share {} is {}; shares are not negative", i, options.previous[i]);
  }
  for (std::size_t i = 1; i < options.reduction_seconds.size(); ++i) {
    require_seconds(options.reduction_seconds[i], "reduction_seconds", i);
  }
}

ShareLimits limits_of(const SplitOptions& options, std::size_t device) {
  return options.limits.empty() ? ShareLimits{} : options.limits[device];
}

// The range of grains whose items, grains * granularity + offset, lie in [minimum, maximum].
GrainRange range_of(const GrainCost& cost, std::int64_t minimum, std::int64_t maximum, std::int64_t granularity,
                    std::int64_t offset) {
  const std::int64_t above = std::max<std::int64_t>(minimum - offset, 0);
  const std::int64_t low = above / granularity + (above % granularity != 0 ? 1 : 0);
  return {cost, low, maximum >= offset ? (maximum - offset) / granularity : -1};
}

SplitProblem problem_of(std::int64_t batch_size, std::span<const CostModel> models, const SplitOptions& options) {
  SplitProblem problem;
  const std::int64_t granularity = options.granularity;
  const std::int64_t remainder = batch_size % granularity;
  problem.grains = batch_size / granularity;
  problem.has_remainder = remainder > 0;
  problem.has_previous = !options.previous.empty();
  problem.reduction_seconds = options.reduction_seconds;
  problem.candidates.resize(models.size());
  for (std::size_t i = 0; i < models.size(); ++i) {
    const ShareLimits limits = limits_of(options, i);
    const std::int64_t minimum = std::max<std::int64_t>(limits.minimum, 1);
    const std::int64_t maximum = std::min(limits.maximum, batch_size);
    require(std::isfinite(models[i].seconds(maximum) + limits.startup_seconds),
            "the cost model of device {} overflows at {}; check its units", i, plural(maximum, "item"));
    const auto range = [&](std::int64_t rest) {
      return range_of({models[i], limits.startup_seconds, granularity, rest}, minimum, maximum, granularity, rest);
    };
    RoleRanges& candidate = problem.candidates[i];
    candidate.in(Role::work) = range(0);
    if (remainder > 0) candidate.in(Role::carry) = range(remainder);
    if (limits.may_be_zero) candidate.in(Role::idle) = {{}, 0, 0};
    if (!problem.has_previous) continue;
    const std::int64_t grains = options.previous[i] / granularity;
    const std::int64_t rest = options.previous[i] % granularity;
    const Role role = options.previous[i] == 0 ? Role::idle : rest == 0 ? Role::work : Role::carry;
    const GrainRange& same = candidate.in(role);
    if ((rest == 0 || rest == remainder) && grains >= same.low && grains <= same.high) {
      candidate.in(Role::keep) = {same.cost, grains, grains};
    }
  }
  return problem;
}

// Says which constraint makes the split impossible: the limits alone, the limits with the granularity, or the gaps
// between zero and the minimums.
[[noreturn]] void throw_infeasible(std::int64_t batch_size, std::size_t device_count, const SplitOptions& options) {
  std::int64_t most = 0;
  std::int64_t least = 0;
  std::int64_t most_in_grains = 0;
  std::size_t gaps = 0;
  for (std::size_t i = 0; i < device_count; ++i) {
    const ShareLimits limits = limits_of(options, i);
    most = saturating_add(most, limits.maximum);
    most_in_grains = saturating_add(most_in_grains, limits.maximum / options.granularity * options.granularity);
    require(
        limits.may_be_zero || limits.maximum > 0,
        "device {} must take part (may_be_zero is false), but its maximum is 0; raise the maximum or let it be zero",
        i);
    if (!limits.may_be_zero) least = saturating_add(least, std::max<std::int64_t>(limits.minimum, 1));
    if (limits.may_be_zero && limits.minimum > 1) ++gaps;
  }
  const std::string batch = plural(batch_size, "item");
  const std::string devices = plural(device_count, "device");
  const std::int64_t remainder = batch_size % options.granularity;
  require(most >= batch_size,
          "a batch of {} does not fit: the maximums of the {} add up to {}; raise a maximum, add a device or make the "
          "batch smaller",
          batch, devices, most);
  require(
      least <= batch_size,
      "a batch of {} is too small: the minimums of the devices that must take part (may_be_zero is false) add up to "
      "{}; lower a minimum or let a device be zero",
      batch, least);
  require(saturating_add(most_in_grains, remainder) >= batch_size,
          "a batch of {} does not fit in shares that are multiples of the granularity {}: below their maximums the {} "
          "can take {}, and one share the remainder of {}; lower the granularity or make the maximums multiples of it",
          batch, options.granularity, devices, most_in_grains, remainder);
  const char* searched = device_count > kExactDevices && gaps > 0
                             ? " (with more than 8 devices the search stops early and may have missed one)"
                             : "";
  refuse(
      "no shares add up to a batch of {}: {} a minimum above one item, shares are multiples "
      "of {} except one with the remainder of {}, and devices that must take part need at least {}{}; "
      "lower the minimums or the granularity, or raise the maximums",
      batch, plural(gaps, "device has", "devices have"), options.granularity, remainder, plural(least, "item"),
      searched);
}

}  // namespace

Split split_batch(std::int64_t batch_size, std::span<const CostModel> models, const SplitOptions& options) {
  validate(batch_size, models, options);
  Split split;
  if (batch_size == 0) {
    const auto forced = [](const ShareLimits& limits) { return !limits.may_be_zero; };
    if (std::any_of(options.limits.begin(), options.limits.end(), forced))
      throw_infeasible(batch_size, models.size(), options);
    split.shares.assign(models.size(), 0);
    return split;
  }
  if (!solve(problem_of(batch_size, models, options), split)) throw_infeasible(batch_size, models.size(), options);
  return split;
}

}  // namespace paceline::plan
