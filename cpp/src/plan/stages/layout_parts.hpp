// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <paceline/plan/layout.hpp>

#include "plan/numbers.hpp"

namespace paceline::plan {

constexpr std::size_t kMostSubsetDevices = 8;  // 255 subsets, 4140 set partitions

[[nodiscard]] std::int64_t gradient_bytes_of(const BlockCost& block);

/// How long it takes to reduce gradients of so many bytes over `spaces` memory spaces.
[[nodiscard]] double reduction_seconds(const LinkCost& link, std::size_t spaces, std::int64_t bytes);

/// The number of memory spaces of these devices.
[[nodiscard]] std::size_t count_spaces(const StageProblem& problem, std::span<const std::size_t> devices);

/// Gives `count` grains one at a time to the one of `takers` that would finish it first, on a tie to the first one.
/// That minimises the latest finish, if seconds(i, n) does not decrease with n. Empty if they cannot take all.
template <class Seconds>
[[nodiscard]] std::vector<std::int64_t> share_out(std::int64_t count, std::size_t takers, const Seconds& seconds) {
  std::vector<std::int64_t> shares(takers, 0);
  std::vector<double> next;
  for (std::size_t i = 0; i < takers; ++i) next.push_back(seconds(i, std::int64_t{1}));
  for (std::int64_t given = 0; given < count; ++given) {
    const auto first = static_cast<std::size_t>(std::ranges::min_element(next) - next.begin());
    if (!(next[first] < kInfinity)) return {};
    ++shares[first];
    next[first] = seconds(first, shares[first] + 1);
  }
  return shares;
}

[[nodiscard]] Layout data_parallel_layout(const StageProblem& problem, const LayoutOptions& options);
/// The best pipeline over all devices.
[[nodiscard]] Layout pipeline_layout(const StageProblem& problem, const LayoutOptions& options);
/// `single`: the best single pipeline.
[[nodiscard]] Layout replicas_layout(const StageProblem& problem, const LayoutOptions& options, const Layout& single);

}  // namespace paceline::plan
