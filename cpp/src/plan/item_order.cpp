// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

#include "item_problem.hpp"

namespace paceline::plan::detail {
namespace {

constexpr unsigned kDigitBits = 8;
constexpr std::size_t kDigits = 32 / kDigitBits;
constexpr std::size_t kValues = std::size_t{1} << kDigitBits;

// The leading half of the value's bits, inverted, above the index.
std::uint64_t entry_of(double value, std::size_t index) {
  constexpr std::uint64_t kLeading = ~std::uint64_t{0} << 32;
  // + 0.0: a negative zero would be the largest.
  return (~std::bit_cast<std::uint64_t>(value + 0.0) & kLeading) | index;
}

std::size_t digit(std::uint64_t entry, std::size_t place) { return (entry >> (32 + place * kDigitBits)) % kValues; }

}  // namespace

// Sorting by comparison mispredicts every second branch: 1024 random costs took as long as all the rest of a split.
// Bits of doubles that are not negative are ordered as the doubles are, so their leading half (an exponent and 20 bits:
// token counts lie wholly in it) is sorted by digits, least first. That keeps the order of ties; what differs only in
// the other half is sorted afterwards.
std::vector<Rank> descending_order(std::span<const double> values) {
  std::vector<Rank> order(values.size());
  const auto before = [&](Rank a, Rank b) { return values[a] != values[b] ? values[a] > values[b] : a < b; };
  constexpr std::size_t kTooFewForDigits = 128;
  if (values.size() < kTooFewForDigits) {
    std::iota(order.begin(), order.end(), Rank{0});
    std::sort(order.begin(), order.end(), before);
    return order;
  }
  std::vector<std::uint64_t> from(values.size());
  std::vector<std::uint64_t> to(values.size());
  std::array<std::array<std::uint32_t, kValues>, kDigits> starts{};
  for (std::size_t i = 0; i < values.size(); ++i) {
    from[i] = entry_of(values[i], i);
    for (std::size_t place = 0; place < kDigits; ++place) ++starts[place][digit(from[i], place)];
  }
  for (std::size_t place = 0; place < kDigits; ++place) {
    if (starts[place][digit(from.front(), place)] == values.size()) continue;  // the same digit everywhere
    std::uint32_t start = 0;
    for (std::uint32_t& slot : starts[place]) start += std::exchange(slot, start);
    for (const std::uint64_t entry : from) to[starts[place][digit(entry, place)]++] = entry;
    from.swap(to);
  }
  for (std::size_t i = 0; i < from.size(); ++i) order[i] = static_cast<Rank>(from[i]);
  for (std::size_t first = 0; first < from.size();) {
    std::size_t end = first + 1;
    while (end < from.size() && from[end] >> 32 == from[first] >> 32) ++end;
    if (end - first > 1) std::sort(order.begin() + first, order.begin() + end, before);
    first = end;
  }
  return order;
}

}  // namespace paceline::plan::detail
