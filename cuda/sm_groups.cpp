// SPDX-License-Identifier: Apache-2.0
#include "sm_groups.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include <paceline/error.hpp>

namespace paceline::cuda {
namespace {

// A computed fraction, such as 3 * 0.1, may miss a whole number of groups by a rounding error.
constexpr double kRounding = 1e-6;

void require_a_group(double fraction, int group_count, std::string_view gpu) {
  if (fraction * group_count >= 1.0 - kRounding) return;
  const double smallest = std::ceil(1e4 / group_count) / 1e4;  // rounded up, so that the printed value is accepted
  throw InvalidArgument(
      fmt::format(
          "partition: {:.4g} of {} is less than the smallest group of SMs that CUDA makes there, of which it has "
          "{}: the smallest possible fraction is {:.4f}.",
          fraction, gpu, group_count, smallest),
      std::string(gpu));
}

}  // namespace

std::vector<int> deal_groups(std::span<const double> fractions, int group_count, std::string_view gpu) {
  std::vector<int> groups;
  std::vector<double> lost;
  double wanted = kRounding;
  for (const double fraction : fractions) {
    require_a_group(fraction, group_count, gpu);
    const double exact = fraction * group_count;
    groups.push_back(static_cast<int>(std::floor(exact + kRounding)));
    lost.push_back(exact - groups.back());
    wanted += exact;
  }
  int left = static_cast<int>(std::floor(wanted)) - std::accumulate(groups.begin(), groups.end(), 0);

  std::vector<std::size_t> order(fractions.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return lost[a] != lost[b] ? lost[a] > lost[b] : fractions[a] > fractions[b];  // keeps equal fractions together
  });
  for (auto alike = order.begin(); alike != order.end();) {
    const auto end = std::find_if(alike, order.end(), [&](std::size_t i) { return fractions[i] != fractions[*alike]; });
    const auto count = static_cast<int>(end - alike);
    if (count > left) break;
    for (; alike != end; ++alike) ++groups[*alike];
    left -= count;
  }
  return groups;
}

}  // namespace paceline::cuda
