// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/item_packing.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <numeric>

#include <paceline/plan/corrections.hpp>

#include "plan/numbers.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

constexpr std::int64_t kMostEqualPieces = 4;
constexpr double kEqualPiecesOverhead = 0.01;

void check(std::span<const double> lengths, const PackOptions& options) {
  if (options.max_items < 1 || options.min_items < 1) {
    refuse("pack_items: max_items is {} and min_items {}; a micro-batch has at least one item", options.max_items,
           options.min_items);
  }
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    if (!std::isfinite(lengths[k]) || lengths[k] < 0.0)
      refuse("pack_items: the length of item {} is {}; lengths are finite and not negative", k, lengths[k]);
    if (k > 0 && lengths[k] > lengths[k - 1])
      refuse("pack_items: item {} is longer than the one before; sort them descending", k);
  }
}

std::vector<std::int64_t> padded_cuts(const std::vector<double>& item_seconds, double fixed, std::int64_t min_items,
                                      std::int64_t max_items) {
  struct Candidate {
    std::int64_t cut = 0;
    std::int64_t from = 0;  // the end from which on it is the best known last cut
  };
  const auto index = [](std::int64_t k) { return static_cast<std::size_t>(k); };
  const std::int64_t n = std::ssize(item_seconds);
  max_items = std::max(max_items, saturating_multiply(2, min_items) - 1);
  // The least total time of the first j items, and the cut before the last micro-batch that gives it.
  std::vector<double> least(item_seconds.size() + 1, kInfinity);
  std::vector<std::int64_t> cuts(item_seconds.size() + 1, 0);
  least.front() = 0.0;
  const auto total = [&](std::int64_t cut, std::int64_t end) {
    if (end - cut > max_items) return kInfinity;
    return least[index(cut)] + fixed + static_cast<double>(end - cut) * item_seconds[index(cut)];
  };
  std::deque<Candidate> candidates;
  for (std::int64_t end = min_items; end <= n; ++end) {
    const std::int64_t latest = end - min_items;
    // A later cut that is better for one end is better for all further ends, even if both leave too many items.
    const auto latest_is_better = [&](std::int64_t other, std::int64_t at) {
      return at - other > max_items || total(latest, at) < total(other, at);
    };
    if (std::isfinite(least[index(latest)])) {
      const auto from = [&] { return std::max(candidates.back().from, end); };
      while (!candidates.empty() && latest_is_better(candidates.back().cut, from())) candidates.pop_back();
      std::int64_t low = candidates.empty() ? end - 1 : from();  // not better there
      std::int64_t high = candidates.empty() ? end : n + 1;      // better, or beyond the end
      while (high - low > 1) {
        const std::int64_t middle = std::midpoint(low, high);
        (latest_is_better(candidates.back().cut, middle) ? high : low) = middle;
      }
      if (high <= n) candidates.push_back({latest, high});
    }
    while (candidates.size() > 1 && candidates[1].from <= end) candidates.pop_front();
    cuts[index(end)] = candidates.front().cut;
    least[index(end)] = total(candidates.front().cut, end);
  }
  std::vector<std::int64_t> bounds{n};
  while (bounds.back() > 0) bounds.push_back(cuts[index(bounds.back())]);
  std::ranges::reverse(bounds);
  return bounds;
}

/// Pieces of about equal time.
std::vector<std::int64_t> equal_pieces(const std::vector<double>& item_seconds, double fixed,
                                       const PackOptions& options) {
  const auto n = static_cast<std::int64_t>(item_seconds.size());
  const double sum = std::accumulate(item_seconds.begin(), item_seconds.end(), 0.0);
  const double affordable = fixed > 0.0 ? kEqualPiecesOverhead * sum / fixed : static_cast<double>(kMostEqualPieces);
  const std::int64_t pieces =
      std::min(n, 1 + static_cast<std::int64_t>(std::min(affordable, static_cast<double>(kMostEqualPieces - 1))));
  std::vector<std::int64_t> bounds{0};
  double done = 0.0;
  for (std::int64_t k = 0; k < n; ++k) {
    done += item_seconds[static_cast<std::size_t>(k)];
    const auto begun = static_cast<std::int64_t>(bounds.size());
    const std::int64_t size = k + 1 - bounds.back();
    const std::int64_t left = n - bounds.back();
    const bool full = size == fitting_piece(options.max_items, left, options.min_items);
    const bool enough = begun < pieces && done * static_cast<double>(pieces) >= sum * static_cast<double>(begun);
    if (full || (enough && size == fitting_piece(size, left, options.min_items))) bounds.push_back(k + 1);
  }
  return bounds;
}

}  // namespace

double ItemShape::micro_batch(std::span<const double> lengths) const noexcept {
  if (lengths.empty()) return 0.0;
  if (measure == ItemMeasure::sum) {
    double sum = cost.fixed_seconds;
    for (const double length : lengths) sum += item(length);
    return sum;
  }
  return cost.fixed_seconds +
         static_cast<double>(lengths.size()) * item(*std::max_element(lengths.begin(), lengths.end()));
}

std::vector<std::int64_t> pack_items(std::span<const double> lengths_descending, const ItemShape& shape,
                                     const PackOptions& options) {
  check(lengths_descending, options);
  if (lengths_descending.empty()) return {0};
  std::vector<double> item_seconds;
  double sum = 0.0;
  for (const double length : lengths_descending) sum += item_seconds.emplace_back(shape.item(length));
  if (shape.measure != ItemMeasure::padded) {
    return equal_pieces(item_seconds, shape.cost.fixed_seconds, options);
  }
  const double fixed = std::max(shape.cost.fixed_seconds, options.least_fixed * sum);
  return padded_cuts(item_seconds, fixed, options.min_items, options.max_items);
}

}  // namespace paceline::plan
