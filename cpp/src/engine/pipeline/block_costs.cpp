// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/block_costs.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

#include "plan/line_fit.hpp"

namespace paceline::internal {
namespace {

constexpr double kLeastDifference = 0.05;  // between devices' speeds, to be taken for more than noise

struct Ratio {
  double value = 0.0;
  double weight = 0.0;
};

/// Half of the weight lies on each side of it.
double weighted_median(std::vector<Ratio> ratios) {
  std::ranges::sort(ratios, {}, &Ratio::value);
  double left = 0.0;
  for (const Ratio& one : ratios) left += one.weight / 2.0;
  for (const Ratio& one : ratios) {
    if ((left -= one.weight) <= 0.0) return one.value;
  }
  return ratios.back().value;
}

/// The median; of an even number the smaller of the two, since what disturbs a run only makes it longer.
double lower_median(std::vector<double> values) {
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// A block, whether it is its backward, and items.
using Key = std::tuple<std::size_t, bool, std::int64_t>;

/// Speeds by what devices have run in common, beginning with the device that ran most. `times`: of each device.
std::vector<double> speeds_of(const std::vector<std::map<Key, double>>& times) {
  const std::size_t device_count = times.size();
  std::vector<std::optional<double>> speeds(device_count);
  const auto most = std::ranges::max_element(times, {}, [](const auto& mine) { return mine.size(); });
  speeds[static_cast<std::size_t>(most - times.begin())] = 1.0;
  for (bool found = true; found;) {
    found = false;
    for (std::size_t d = 0; d < device_count; ++d) {
      if (speeds[d]) continue;
      std::vector<Ratio> ratios;
      for (std::size_t other = 0; other < device_count; ++other) {
        if (!speeds[other]) continue;
        for (const auto& [key, seconds] : times[d]) {
          const auto theirs = times[other].find(key);
          if (theirs == times[other].end() || !(seconds > 0.0) || !(theirs->second > 0.0)) continue;
          ratios.push_back({*speeds[other] * theirs->second / seconds, seconds});
        }
      }
      if (ratios.empty()) continue;
      speeds[d] = weighted_median(std::move(ratios));
      found = true;
    }
  }
  double sum = 0.0;
  double known = 0.0;
  double least = 1.0;
  double most_of_all = 0.0;
  for (std::size_t d = 0; d < device_count; ++d) {
    if (!speeds[d] || times[d].empty()) continue;
    sum += *speeds[d];
    known += 1.0;
    least = std::min(least, *speeds[d]);
    most_of_all = std::max(most_of_all, *speeds[d]);
  }
  const bool differ = sum > 0.0 && most_of_all > least * (1.0 + kLeastDifference);
  std::vector<double> result;
  for (const auto& speed : speeds) result.push_back(speed && differ ? *speed * known / sum : 1.0);
  return result;
}

}  // namespace

BlockFit fit_costs(std::span<const BlockSample> samples, std::size_t device_count, std::vector<plan::BlockCost>& blocks,
                   std::span<const std::size_t> classes) {
  std::vector<std::map<Key, std::vector<double>>> seconds(device_count);
  for (const BlockSample& one : samples) {
    seconds[one.device][{one.block, one.backward, one.items}].push_back(one.seconds);
  }
  std::vector<std::map<Key, double>> times(device_count);
  for (std::size_t d = 0; d < device_count; ++d) {
    for (const auto& [key, all] : seconds[d]) times[d][key] = lower_median(all);
  }
  BlockFit fit{.speeds = speeds_of(times)};
  std::map<Key, std::vector<double>> of_classes;
  const auto class_of = [&](std::size_t block) { return classes.empty() ? block : classes[block]; };
  for (std::size_t d = 0; d < device_count; ++d) {
    for (const auto& [key, time] : times[d]) {
      const auto& [block, backward, items] = key;
      of_classes[{class_of(block), backward, items}].push_back(time * fit.speeds[d]);
    }
  }
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    plan::LineFit forward, backward;
    for (const auto& [key, all] : of_classes) {
      const auto& [own, is_backward, items] = key;
      if (own == class_of(b)) (is_backward ? backward : forward).add(static_cast<double>(items), lower_median(all));
    }
    const auto write = [](const plan::LineFit& line, double& fixed, double& per_item) {
      if (line.samples() == 0) return;
      const plan::CostModel model = line.model();
      fixed = model.fixed_seconds();
      per_item = model.per_item_seconds();
    };
    write(forward, blocks[b].forward_fixed, blocks[b].forward_per_item);
    write(backward, blocks[b].backward_fixed, blocks[b].backward_per_item);
  }
  return fit;
}

}  // namespace paceline::internal
