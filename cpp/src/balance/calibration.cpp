// SPDX-License-Identifier: Apache-2.0
#include "balance/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "balance/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr double kLargestDrop = 0.75;
constexpr double kLargestRise = 1.0 / 3.0;
constexpr std::size_t kDevicesPerDrop = 4;
constexpr double kMuchSlower = 1.5;       // times slower; the noise of a first step is less
constexpr std::int64_t kLeastGrains = 4;  // of an even share; fewer have no quarter
constexpr int kInformativeSteps = 2;
constexpr int kSteps = 4;        // at most, even if all their timings are excluded
constexpr double kKnown = 0.03;  // a smaller error of the fixed part does not matter at twice or half the size

/// Seconds of an even share by the first step's evidence; 0 where there is none.
double even_seconds(const PolicyContext& context, const std::vector<std::int64_t>& even, std::size_t i) {
  return context.estimator.devices()[i].scale > 0.0 ? context.estimator.model(i).seconds(even[i]) : 0.0;
}

/// Which devices get less: one in four of each class, but at most half of all. They are the first ones of a class or,
/// once there is evidence, the slow ones, because the others wait for these. Each step begins with another class, so
/// that no class is left out twice if there are as many classes as half the devices.
std::vector<bool> choose_drops(const PolicyContext& context, const std::vector<std::int64_t>& even,
                               const std::vector<std::size_t>& active, std::size_t steps) {
  std::vector<bool> drops(context.limits.size(), false);
  std::size_t left = active.size() / 2;
  const std::size_t classes = context.estimator.class_count();
  for (std::size_t c = 0; c < classes; ++c) {
    std::vector<std::size_t> members;
    for (const std::size_t i : active) {
      if (context.estimator.class_of(i) == (c + steps) % classes) members.push_back(i);
    }
    const auto slower = [&](std::size_t a, std::size_t b) {
      return even_seconds(context, even, a) > kMuchSlower * even_seconds(context, even, b);
    };
    const std::size_t wanted = std::min(left, (members.size() + kDevicesPerDrop - 1) / kDevicesPerDrop);
    for (std::size_t k = 0; k < wanted; ++k) {
      std::size_t worst = k;
      for (std::size_t j = k + 1; j < members.size(); ++j) {
        if (slower(members[j], members[worst])) worst = j;
      }
      std::swap(members[k], members[worst]);
      drops[members[k]] = true;
    }
    left -= wanted;
  }
  return drops;
}

}  // namespace

std::optional<std::vector<std::int64_t>> Calibration::shares(const PolicyContext& context,
                                                             const std::vector<std::int64_t>& even) const {
  if (done_) return std::nullopt;
  const std::int64_t grain = context.granularity;
  std::vector<std::size_t> active;
  for (std::size_t i = 0; i < even.size(); ++i) {
    if (even[i] > 0) active.push_back(i);
  }
  if (active.size() < 2) return std::nullopt;
  const std::vector<bool> drops = choose_drops(context, even, active, static_cast<std::size_t>(steps_));
  const auto dropped = static_cast<double>(std::count(drops.begin(), drops.end(), true));
  const auto raised = static_cast<double>(active.size()) - dropped;
  const double most = std::min(1.0, kLargestRise * raised / dropped);
  std::vector<double> times;
  for (const std::size_t i : active) times.push_back(even_seconds(context, even, i));
  const double typical = median_in_place(times);
  std::vector<std::int64_t> shares = even;
  std::int64_t released = 0;
  for (const std::size_t i : active) {
    if (even[i] < kLeastGrains * grain) return std::nullopt;
    if (!drops[i]) continue;
    const double seconds = even_seconds(context, even, i);
    const double fitting = seconds > 0.0 ? 1.0 - typical / seconds : 0.0;  // then it finishes with the others
    const double drop = std::min(most, std::max(kLargestDrop, fitting));
    const std::int64_t all = even[i] / grain;
    const auto grains = std::min(all - 1, static_cast<std::int64_t>(std::floor(drop * static_cast<double>(all))));
    shares[i] -= grains * grain;
    released += grains;
    if (shares[i] < context.limits[i].minimum) return std::nullopt;
  }
  auto raised_left = static_cast<std::int64_t>(raised);
  for (const std::size_t i : active) {
    if (drops[i]) continue;
    const std::int64_t part = released / raised_left;
    shares[i] += part * grain;
    released -= part;
    --raised_left;
    if (shares[i] > context.limits[i].maximum) return std::nullopt;
  }
  return shares;
}

void Calibration::observe(const PolicyContext& context) {
  if (done_) return;
  ++steps_;
  if (context.estimator.has_evidence()) ++informative_steps_;
  bool known = context.estimator.has_evidence();
  for (std::size_t i = 0; i < context.limits.size(); ++i) {
    known = known && context.estimator.shape_of(i).error() <= kKnown;
  }
  done_ = known || informative_steps_ >= kInformativeSteps || steps_ >= kSteps;
}

}  // namespace paceline::balance
