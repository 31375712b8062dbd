// SPDX-License-Identifier: Apache-2.0
#include "balance/memory_model.hpp"

#include <algorithm>

namespace paceline::balance {

void MemoryModel::add(double size, std::int64_t bytes) {
  if (bytes <= 0) {
    ++silent_;
    return;
  }
  const Measured measured{size, bytes};
  if (!smallest_) smallest_ = largest_ = measured;
  for (std::optional<Measured>* const end : {&smallest_, &largest_}) {
    Measured& known = **end;
    if (size == known.size) {
      known.bytes = std::max(known.bytes, bytes);
    } else if (end == &smallest_ ? size < known.size : size > known.size) {
      known = measured;
    }
  }
}

std::optional<double> MemoryModel::largest() const { return largest_ ? std::optional(largest_->size) : std::nullopt; }

double MemoryModel::bytes_per_size() const {
  if (sizes() == 0) return 0.0;
  if (sizes() == 1) return static_cast<double>(smallest_->bytes) / smallest_->size;
  return std::max(0.0, static_cast<double>(largest_->bytes - smallest_->bytes) / (largest_->size - smallest_->size));
}

double MemoryModel::fixed_bytes() const {
  if (sizes() < 2) return 0.0;
  return std::max(0.0, static_cast<double>(largest_->bytes) - bytes_per_size() * largest_->size);
}

std::optional<double> MemoryModel::most(std::int64_t limit_bytes) const {
  const double per_size = bytes_per_size();
  if (per_size <= 0.0) return std::nullopt;
  return std::max(0.0, (static_cast<double>(limit_bytes) - fixed_bytes()) / per_size);
}

}  // namespace paceline::balance
