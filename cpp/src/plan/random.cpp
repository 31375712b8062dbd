// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/random.hpp>

#include <cmath>
#include <numbers>

namespace paceline::plan {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

std::uint64_t mix(std::uint64_t z) noexcept {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace

// Hashed one after the other: a sum of the three would give neighbouring keys overlapping streams.
Random::Random(std::uint64_t seed, std::uint64_t step, std::uint64_t device) noexcept
    : state_(mix(mix(mix(seed + kGolden) + step + kGolden) + device + kGolden)) {}

std::uint64_t Random::next() noexcept { return mix(state_ += kGolden); }

double Random::uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

double Random::normal() noexcept {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

}  // namespace paceline::plan
