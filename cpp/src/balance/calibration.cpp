// SPDX-License-Identifier: Apache-2.0
#include "balance/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace paceline::balance {
namespace {

constexpr double kLargestDrop = 0.75;
constexpr double kLargestRise = 1.0 / 3.0;
constexpr std::size_t kDevicesPerDrop = 4;
constexpr std::int64_t kLeastGrains = 4;  // an even share of fewer grains has no quarter
constexpr int kInformativeSteps = 2;
constexpr int kSteps = 4;        // steps whose timings are all excluded are not waited for without end
constexpr double kKnown = 0.03;  // an error of the fixed part that no longer matters at twice or half the size

/// Which devices go down: one in four of each class, the first ones, but at most half of all.
std::vector<bool> choose_drops(const PolicyContext& context, const std::vector<std::size_t>& active) {
  std::vector<std::size_t> class_size(context.estimator.class_count(), 0);
  for (const std::size_t i : active) ++class_size[context.estimator.class_of(i)];
  std::vector<std::size_t> wanted;
  for (const std::size_t size : class_size) wanted.push_back((size + kDevicesPerDrop - 1) / kDevicesPerDrop);
  std::vector<bool> drops(context.limits.size(), false);
  std::size_t left = active.size() / 2;
  for (const std::size_t i : active) {
    std::size_t& want = wanted[context.estimator.class_of(i)];
    if (want == 0 || left == 0) continue;
    drops[i] = true;
    --want;
    --left;
  }
  return drops;
}

}  // namespace

std::optional<std::vector<std::int64_t>> Calibration::shares(const PolicyContext& context,
                                                             const std::vector<std::int64_t>& even) const {
  if (done_) return std::nullopt;
  const std::int64_t grain = context.options.granularity;
  std::vector<std::size_t> active;
  for (std::size_t i = 0; i < even.size(); ++i) {
    if (even[i] > 0) active.push_back(i);
  }
  if (active.size() < 2) return std::nullopt;
  const std::vector<bool> drops = choose_drops(context, active);
  const auto dropped = static_cast<double>(std::count(drops.begin(), drops.end(), true));
  const auto raised = static_cast<double>(active.size()) - dropped;
  const double drop = std::min(kLargestDrop, kLargestRise * raised / dropped);
  std::vector<std::int64_t> shares = even;
  std::int64_t released = 0;
  for (const std::size_t i : active) {
    if (even[i] < kLeastGrains * grain) return std::nullopt;
    if (!drops[i]) continue;
    const auto grains = static_cast<std::int64_t>(std::floor(drop * static_cast<double>(even[i] / grain)));
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
