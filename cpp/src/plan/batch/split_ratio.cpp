// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>
#include <numeric>

#include <paceline/plan/split.hpp>

#include "refuse.hpp"

namespace paceline::plan {
namespace {

void require_batch(std::int64_t batch_size) {
  // The product with a weight must be exact enough for its whole part to be right.
  constexpr std::int64_t largest = std::int64_t{1} << 50;
  if (batch_size >= 0 && batch_size <= largest) return;
  refuse("batch_size is {}; it must be from 0 to {}", batch_size, largest);
}

}  // namespace

std::vector<std::int64_t> split_weighted(std::int64_t batch_size, std::span<const double> weights) {
  require_batch(batch_size);
  double largest = 0.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0.0)
      refuse("weight {} is {}; weights must be finite and not negative", i, weights[i]);
    largest = std::max(largest, weights[i]);
  }
  if (largest <= 0.0)
    refuse("{} weights and none above zero; at least one device needs a weight above zero", weights.size());
  // Weights are scaled by the largest one. So no sum overflows, and small ones keep their ratio.
  double sum = 0.0;
  for (const double weight : weights) sum += weight / largest;
  std::vector<std::int64_t> shares(weights.size(), 0);
  std::vector<double> remainders(weights.size(), -1.0);  // -1: a zero weight, which never gets an item
  std::int64_t left = batch_size;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0.0) continue;
    const double quota = static_cast<double>(batch_size) * (weights[i] / largest / sum);
    shares[i] = std::min(static_cast<std::int64_t>(quota), left);  // rounding of quotas must not overspend
    remainders[i] = quota - static_cast<double>(shares[i]);
    left -= shares[i];
  }
  std::vector<std::size_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return remainders[a] > remainders[b]; });
  for (std::size_t next = 0; left > 0; next = (next + 1) % order.size()) {
    if (weights[order[next]] <= 0.0) continue;
    ++shares[order[next]];
    --left;
  }
  return shares;
}

std::vector<std::int64_t> split_even(std::int64_t batch_size, std::int64_t device_count) {
  require_batch(batch_size);
  if (device_count < 1) refuse("device_count is {}; there must be at least one device", device_count);
  std::vector<std::int64_t> shares(static_cast<std::size_t>(device_count), batch_size / device_count);
  std::fill_n(shares.begin(), batch_size % device_count, batch_size / device_count + 1);
  return shares;
}

}  // namespace paceline::plan
