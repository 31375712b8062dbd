// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/item_packing.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>

#include <paceline/error.hpp>
#include <paceline/plan/corrections.hpp>

namespace paceline::plan {
namespace {

constexpr std::int64_t kMostEqualPieces = 4;
constexpr double kEqualPiecesOverhead = 0.01;

void check(std::span<const double> lengths, const PackOptions& options) {
  if (options.max_items < 1 || options.min_items < 1) {
    throw InvalidArgument(
        fmt::format("pack_items: max_items is {} and min_items {}; a micro-batch has at least one item",
                    options.max_items, options.min_items));
  }
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    if (!std::isfinite(lengths[k]) || lengths[k] < 0.0) {
      throw InvalidArgument(
          fmt::format("pack_items: the length of item {} is {}; lengths are finite and not negative", k, lengths[k]));
    }
    if (k > 0 && lengths[k] > lengths[k - 1]) {
      throw InvalidArgument(fmt::format("pack_items: item {} is longer than the one before; sort them descending", k));
    }
  }
}

/// The least total time of the first j items, and the cut before the last micro-batch that gives it.
class PaddedCuts {
 public:
  PaddedCuts(std::vector<double> item_seconds, double fixed, std::int64_t min_items, std::int64_t max_items)
      : item_(std::move(item_seconds)),
        fixed_(fixed),
        min_items_(min_items),
        max_items_(std::max(max_items, 2 * min_items - 1)),
        best_(item_.size() + 1, std::numeric_limits<double>::infinity()),
        cut_(item_.size() + 1, 0) {
    best_.front() = 0.0;
  }

  std::vector<std::int64_t> solve() {
    const auto n = static_cast<std::int64_t>(item_.size());
    // For each candidate for the last cut, the end from which on it is the best known one.
    std::deque<Candidate> candidates;
    for (std::int64_t end = min_items_; end <= n; ++end) {
      const std::int64_t latest = end - min_items_;
      if (std::isfinite(best_[index(latest)])) add(candidates, latest, n);
      while (candidates.size() > 1 && candidates[1].from <= end) candidates.pop_front();
      const std::int64_t cut = candidates.front().cut;
      best_[index(end)] = total(cut, end);
      cut_[index(end)] = cut;
    }
    std::vector<std::int64_t> bounds{n};
    while (bounds.back() > 0) bounds.push_back(cut_[index(bounds.back())]);
    std::reverse(bounds.begin(), bounds.end());
    return bounds;
  }

 private:
  struct Candidate {
    std::int64_t cut = 0;
    std::int64_t from = 0;
  };
  static std::size_t index(std::int64_t k) { return static_cast<std::size_t>(k); }

  [[nodiscard]] double total(std::int64_t cut, std::int64_t end) const {
    if (end - cut > max_items_) return std::numeric_limits<double>::infinity();
    return best_[index(cut)] + fixed_ + static_cast<double>(end - cut) * item_[index(cut)];
  }

  // A later cut that is better for one end is better for all further ends, even if both leave too many items.
  void add(std::deque<Candidate>& candidates, std::int64_t cut, std::int64_t n) const {
    const auto better = [&](std::int64_t other, std::int64_t end) {
      return end - other > max_items_ || total(cut, end) < total(other, end);
    };
    const std::int64_t first = cut + min_items_;
    while (!candidates.empty() && better(candidates.back().cut, std::max(candidates.back().from, first))) {
      candidates.pop_back();
    }
    if (candidates.empty()) {
      candidates.push_back({cut, first});
      return;
    }
    std::int64_t low = std::max(candidates.back().from, first);  // not better there
    std::int64_t high = n + 1;                                   // beyond the end
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (better(candidates.back().cut, middle) ? high : low) = middle;
    }
    if (high <= n) candidates.push_back({cut, high});
  }

  std::vector<double> item_;
  double fixed_;
  std::int64_t min_items_;
  std::int64_t max_items_;
  std::vector<double> best_;
  std::vector<std::int64_t> cut_;
};

/// Pieces of about equal time.
std::vector<std::int64_t> equal_pieces(const std::vector<double>& item_seconds, double fixed,
                                       const PackOptions& options) {
  const auto n = static_cast<std::int64_t>(item_seconds.size());
  double sum = 0.0;
  for (const double seconds : item_seconds) sum += seconds;
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
  return PaddedCuts(std::move(item_seconds), fixed, options.min_items, options.max_items).solve();
}

}  // namespace paceline::plan
