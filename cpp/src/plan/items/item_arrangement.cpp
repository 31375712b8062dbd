// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/item_arrangement.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <paceline/error.hpp>
#include <paceline/plan/items.hpp>

#include "plan/items/item_levelling.hpp"

namespace paceline::plan {
namespace {

constexpr int kRounds = 2;
// Packing changes more afterwards than a finer split would gain.
constexpr double kSplitTolerance = 1e-3;
constexpr double kEvenEnough = 0.002;  // steps of real devices vary by 0.5 % and more
// Of the mean cost. Items without cost get it, so that they do not all go to one device.
constexpr double kLeastCost = 1e-6;

using Items = std::vector<std::int64_t>;
using Packed = std::vector<PackedDevice>;

void check(std::span<const double> costs, std::span<const double> targets, std::span<const ItemShape> shapes) {
  const auto sane = [](double value) { return std::isfinite(value) && value >= 0.0; };
  for (std::size_t k = 0; k < costs.size(); ++k) {
    if (sane(costs[k])) continue;
    throw InvalidArgument(fmt::format("the cost of item {} is {}; costs are finite and not negative", k, costs[k]));
  }
  if (shapes.size() != targets.size()) {
    throw InvalidArgument(fmt::format("arrange_items: {} shapes for {} devices", shapes.size(), targets.size()));
  }
  double sum = 0.0;
  for (std::size_t d = 0; d < targets.size(); ++d) {
    if (!sane(targets[d])) {
      throw InvalidArgument(
          fmt::format("arrange_items: the target of device {} is {}; it is finite and not negative", d, targets[d]));
    }
    sum += targets[d];
  }
  if (!(sum > 0.0)) throw InvalidArgument("arrange_items: no device has a target above 0");
}

std::vector<double> lengths_of(std::span<const double> costs, const Items& items) {
  std::vector<double> lengths;
  lengths.reserve(items.size());
  for (const std::int64_t item : items) lengths.push_back(costs[static_cast<std::size_t>(item)]);
  return lengths;
}

class Arranger {
 public:
  Arranger(std::span<const double> costs, std::span<const double> targets, std::span<const ItemShape> shapes,
           const ArrangeOptions& options)
      : costs_(costs),
        targets_(targets),
        shapes_(shapes),
        pack_{.max_items = options.max_items, .min_items = options.min_items},
        plain_costs_(options.plain_costs) {
    for (std::size_t d = 0; d < targets.size(); ++d) {
      if (targets[d] == 0.0) continue;
      working_.push_back(d);
      working_targets_.push_back(targets[d]);
      working_shapes_.push_back(shapes[d]);
    }
    order_.resize(costs.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](std::int64_t a, std::int64_t b) {
      return costs_[static_cast<std::size_t>(a)] > costs_[static_cast<std::size_t>(b)];
    });
  }

  ItemArrangement run() {
    if (working_.size() == 1) return arranged(packed({order_}));
    const std::vector<double> padded = plain_costs_ ? given_costs() : padded_costs();
    std::vector<double> rates = working_targets_;
    Packed best;
    double best_latest = 0.0;
    for (int round = 0; round < kRounds; ++round) {
      const Packed next = packed(dealt(padded, rates));
      const double latest = latest_of(next);
      if (round == 0 || latest < best_latest) {
        best = next;
        best_latest = latest;
      }
      if (plain_costs_ || !correct(rates, next, latest)) break;
    }
    return arranged(best);
  }

 private:
  /// What each item adds to the time if the whole batch is packed and each device has a part of every micro-batch.
  [[nodiscard]] std::vector<double> padded_costs() const {
    // It uses the shape of the device with most work. Other classes differ, and the rounds correct that.
    ItemShape shape = shapes_[*std::max_element(
        working_.begin(), working_.end(), [&](std::size_t a, std::size_t b) { return targets_[a] < targets_[b]; })];
    shape.cost.fixed_seconds *= static_cast<double>(working_.size());
    const std::vector<double> lengths = lengths_of(costs_, order_);
    PackOptions pack;
    pack.min_items = pack_.min_items;
    pack.least_fixed *= static_cast<double>(working_.size());
    const std::vector<std::int64_t> bounds =
        shape.measure == ItemMeasure::padded ? pack_items(lengths, shape, pack) : std::vector<std::int64_t>{};
    std::vector<double> padded(costs_.size());
    double sum = 0.0;
    std::size_t piece = 0;
    for (std::size_t k = 0; k < order_.size(); ++k) {
      if (piece + 1 < bounds.size() && static_cast<std::int64_t>(k) == bounds[piece + 1]) ++piece;
      const double length = bounds.empty() ? lengths[k] : lengths[static_cast<std::size_t>(bounds[piece])];
      sum += padded[static_cast<std::size_t>(order_[k])] = shape.item(length);
    }
    add_least(padded, sum);
    return padded;
  }

  [[nodiscard]] std::vector<double> given_costs() const {
    std::vector<double> given(costs_.begin(), costs_.end());
    add_least(given, std::accumulate(given.begin(), given.end(), 0.0));
    return given;
  }

  static void add_least(std::vector<double>& costs, double sum) {
    const double least = sum > 0.0 ? kLeastCost * sum / static_cast<double>(costs.size()) : 1.0;
    for (double& cost : costs) cost += least;
  }

  /// Per working device, its items by descending cost.
  [[nodiscard]] std::vector<Items> dealt(const std::vector<double>& padded, const std::vector<double>& rates) const {
    std::vector<LoadModel> models;
    for (const double rate : rates) models.push_back({0.0, 1.0 / rate});
    const ItemSplit split = split_items(padded, models, kSplitTolerance);
    std::vector<std::size_t> owner(costs_.size());
    for (std::size_t w = 0; w < split.items.size(); ++w) {
      for (const std::int64_t item : split.items[w]) owner[static_cast<std::size_t>(item)] = w;
    }
    std::vector<Items> items(working_.size());
    for (const std::int64_t item : order_) items[owner[static_cast<std::size_t>(item)]].push_back(item);
    // A device without items is not measured, and nobody would notice that it has become fast. A device that cannot get
    // enough items for a micro-batch gets none.
    const auto least = static_cast<std::size_t>(pack_.min_items);
    for (Items& mine : items) {
      if (mine.size() >= least) continue;
      const std::size_t lacking = least - mine.size();
      Items& most = *std::max_element(items.begin(), items.end(),
                                      [](const Items& a, const Items& b) { return a.size() < b.size(); });
      if (&most == &mine) continue;  // no device has more
      if (most.size() >= least + lacking) {
        give(most, mine, lacking);
      } else {
        give(mine, most, mine.size());
      }
    }
    return items;
  }

  /// Moves the last `count` items of `from` to their places by cost.
  void give(Items& from, Items& to, std::size_t count) const {
    const auto had = static_cast<std::ptrdiff_t>(to.size());
    to.insert(to.end(), from.end() - static_cast<std::ptrdiff_t>(count), from.end());
    from.resize(from.size() - count);
    std::inplace_merge(to.begin(), to.begin() + had, to.end(), [&](std::int64_t a, std::int64_t b) {
      return costs_[static_cast<std::size_t>(a)] > costs_[static_cast<std::size_t>(b)];
    });
  }

  /// Each working device's items, packed. If padding has made the split uneven, it is levelled.
  [[nodiscard]] Packed packed(const std::vector<Items>& items) const {
    Packed devices(working_.size());
    for (std::size_t w = 0; w < working_.size(); ++w) {
      const ItemShape& shape = working_shapes_[w];
      const std::vector<double> lengths = lengths_of(costs_, items[w]);
      const std::vector<std::int64_t> bounds = pack_items(lengths, shape, pack_);
      for (std::size_t k = 0; k + 1 < bounds.size(); ++k) {
        devices[w].work += shape.micro_batch({lengths.begin() + bounds[k], lengths.begin() + bounds[k + 1]});
        devices[w].micro_batches.emplace_back(items[w].begin() + bounds[k], items[w].begin() + bounds[k + 1]);
      }
    }
    const bool any_unpadded = std::any_of(working_shapes_.begin(), working_shapes_.end(),
                                          [](const ItemShape& shape) { return shape.measure != ItemMeasure::padded; });
    if (!plain_costs_ && !any_unpadded) {
      level_items(devices, costs_, working_shapes_, working_targets_, pack_);
    }
    return devices;
  }

  [[nodiscard]] ItemArrangement arranged(const Packed& packed) const {
    ItemArrangement result;
    result.order.reserve(costs_.size());
    result.bounds.push_back(0);
    result.work.assign(targets_.size(), 0.0);
    std::size_t w = 0;
    for (std::size_t d = 0; d < targets_.size(); ++d) {
      result.first.push_back(result.bounds.size() - 1);
      if (targets_[d] == 0.0) continue;
      for (const Items& items : packed[w].micro_batches) {
        result.order.insert(result.order.end(), items.begin(), items.end());
        result.bounds.push_back(static_cast<std::int64_t>(result.order.size()));
      }
      result.work[d] = packed[w++].work;
    }
    result.first.push_back(result.bounds.size() - 1);
    return result;
  }

  [[nodiscard]] double latest_of(const Packed& packed) const {
    double latest = 0.0;
    for (std::size_t w = 0; w < packed.size(); ++w) latest = std::max(latest, packed[w].work / working_targets_[w]);
    return latest;
  }

  /// Changes the rates by how far off the work is. Returns false if nothing is left to gain.
  [[nodiscard]] bool correct(std::vector<double>& rates, const Packed& packed, double latest) const {
    double work = 0.0;
    double targets = 0.0;
    for (std::size_t w = 0; w < packed.size(); ++w) {
      work += packed[w].work;
      targets += working_targets_[w];
    }
    if (!(work > 0.0) || latest <= (1.0 + kEvenEnough) * work / targets) return false;
    for (std::size_t w = 0; w < packed.size(); ++w) {
      const double ratio = packed[w].work / working_targets_[w] * targets / work;
      rates[w] /= std::clamp(ratio, 0.5, 2.0);  // single items far beyond a target cannot be corrected
    }
    return true;
  }

  std::span<const double> costs_;
  std::span<const double> targets_;
  std::span<const ItemShape> shapes_;
  PackOptions pack_;
  bool plain_costs_;
  std::vector<std::size_t> working_;  // devices with a target, and of these alone:
  std::vector<double> working_targets_;
  std::vector<ItemShape> working_shapes_;
  Items order_;
};

}  // namespace

ItemArrangement arrange_items(std::span<const double> costs, std::span<const double> targets,
                              std::span<const ItemShape> shapes, const ArrangeOptions& options) {
  check(costs, targets, shapes);
  return Arranger(costs, targets, shapes, options).run();
}

}  // namespace paceline::plan
