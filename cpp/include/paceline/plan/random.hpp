// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <paceline/export.hpp>

namespace paceline::plan {

/// Random numbers that depend only on a key, and not on the number of earlier draws.
///
/// SplitMix64 (Steele, Lea & Flood, 2014) starts from a hash of (seed, step, device). So two plans that are compared,
/// or two policies that are simulated, meet the same noise on the same device at the same step, whatever they choose.
/// std::normal_distribution is not used because its output differs between standard libraries. A value type.
class PACELINE_API Random {
 public:
  Random(std::uint64_t seed, std::uint64_t step, std::uint64_t device) noexcept;

  [[nodiscard]] std::uint64_t next() noexcept;
  /// In [0, 1), 53 bits.
  [[nodiscard]] double uniform() noexcept;
  /// Standard normal (Box & Muller, 1958); two uniforms each.
  [[nodiscard]] double normal() noexcept;

 private:
  std::uint64_t state_;
};

}  // namespace paceline::plan
