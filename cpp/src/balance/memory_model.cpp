// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/memory_model.hpp>

#include <algorithm>
#include <iterator>

namespace paceline::balance {

void MemoryModel::add(double size, std::int64_t bytes) {
  if (bytes <= 0) {
    ++silent_;
    return;
  }
  std::int64_t& known = bytes_[size];
  known = std::max(known, bytes);
  if (bytes_.size() > 2) bytes_.erase(std::next(bytes_.begin()));
}

std::optional<double> MemoryModel::largest() const {
  return bytes_.empty() ? std::nullopt : std::optional(bytes_.rbegin()->first);
}

double MemoryModel::bytes_per_size() const {
  if (bytes_.empty()) return 0.0;
  const auto [small, small_bytes] = *bytes_.begin();
  const auto [large, large_bytes] = *bytes_.rbegin();
  if (bytes_.size() == 1) return static_cast<double>(small_bytes) / small;
  return std::max(0.0, static_cast<double>(large_bytes - small_bytes) / (large - small));
}

double MemoryModel::fixed_bytes() const {
  if (bytes_.size() < 2) return 0.0;
  return std::max(0.0, static_cast<double>(bytes_.rbegin()->second) - bytes_per_size() * bytes_.rbegin()->first);
}

std::optional<double> MemoryModel::most(std::int64_t limit_bytes) const {
  const double per_size = bytes_per_size();
  if (per_size <= 0.0) return std::nullopt;
  return std::max(0.0, (static_cast<double>(limit_bytes) - fixed_bytes()) / per_size);
}

}  // namespace paceline::balance
