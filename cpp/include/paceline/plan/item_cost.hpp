// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/items.hpp>

namespace paceline::plan {

/// One timed micro-batch.
struct ItemSample {
  double tokens = 0.0;   ///< in all its items, padding included where padding is computed
  double seconds = 0.0;  ///< above 0
  std::int64_t device = 0;
  /// The sum of the squared lengths of its items. 0: it is one item, tokens squared. n items padded to length l have
  /// n * l tokens and n * l * l squared tokens.
  double squared_tokens = 0.0;
};

/// Seconds of a micro-batch: fixed + per_token * (tokens) + per_squared_token * (sum of squared lengths). The squares
/// are attention, where every token meets every other of its item. No coefficient is negative.
struct ItemCost {
  double fixed_seconds = 0.0;
  double per_token_seconds = 0.0;
  double per_squared_token_seconds = 0.0;

  /// What one more item of this length adds to a micro-batch: the cost to give to split_items.
  [[nodiscard]] double item_seconds(double tokens) const noexcept {
    return per_token_seconds * tokens + per_squared_token_seconds * tokens * tokens;
  }
  /// A micro-batch of this one item.
  [[nodiscard]] double seconds(double tokens) const noexcept { return fixed_seconds + item_seconds(tokens); }
  friend bool operator==(const ItemCost&, const ItemCost&) = default;
};

struct ItemCostFit {
  ItemCost shape;              ///< of the fastest device; all devices of the class have it
  std::vector<double> scales;  ///< per device, how many times slower than the fastest; 0 for a device without samples
  /// The root mean square of (predicted - measured) / measured over all samples: 0.05 is five percent.
  double relative_rms = 0.0;

  /// The device for split_items, with item_seconds() as the items' costs. For a device that was not measured: as fast
  /// as the fastest.
  [[nodiscard]] LoadModel load_model(std::size_t device) const noexcept {
    const double scale = device < scales.size() && scales[device] > 0.0 ? scales[device] : 1.0;
    return {scale * shape.fixed_seconds, scale};
  }
};

/// Fits the cost of an item to timings: one shape for a class of devices, and a scale for each of its devices.
///
/// The fit minimises the squares of the relative errors, because timings vary in proportion to what they measure.
/// Coefficients are not negative: each of the seven sets of columns that may be above zero is solved by
/// orthogonalisation, and the set with the least error wins. For three columns this is the exact solution of the
/// problem (Lawson & Hanson, Solving Least Squares Problems, 1974, chapter 23, search the same sets one by one). Shape
/// and scales are fitted in turn, each with the other fixed, until the error no longer falls.
///
/// The samples may leave the shape open. With one length only, the cost goes into as few columns as possible, fixed
/// seconds first. If devices have no lengths in common, the fit may mix up shape and scale. Deterministic. Pure.
/// O(samples) per round, at most 200 rounds.
///
/// @throws InvalidArgument if there is no sample, or a sample's number is not finite, negative, or (seconds) 0.
PACELINE_API ItemCostFit fit_item_cost(std::span<const ItemSample> samples);

}  // namespace paceline::plan
