// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/item_arrangement.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <ranges>
#include <tuple>
#include <utility>

#include <paceline/plan/items.hpp>

#include "refuse.hpp"

namespace paceline::plan {
namespace {

constexpr int kDealingRounds = 2;  // a second round gains 0.3 % with devices of one class and 2 % with several
// Packing changes more afterwards than a finer split would gain.
constexpr double kSplitTolerance = 1e-3;
constexpr double kEvenEnough = 0.002;  // steps of real devices vary by 0.5 % and more
// Of the mean cost. Items without cost get it, so that they do not all go to one device.
constexpr double kLeastCost = 1e-6;
constexpr int kMostMoves = 256;          // of some microseconds each; more would gain nothing that can be measured
constexpr double kWorthIt = 1.0 - 1e-4;  // of the later of the two

using Items = std::vector<std::int64_t>;

/// A device with a target, and its items, packed. The items of a micro-batch descend in cost, and so do the
/// micro-batches.
struct Device {
  std::size_t index = 0;
  double target = 0.0;
  ItemShape shape;
  std::vector<Items> micro_batches = {};
  double work = 0.0;

  [[nodiscard]] double time() const { return work / target; }
};

using Devices = std::vector<Device>;

struct CostOf {
  std::span<const double> costs;
  double operator()(std::int64_t item) const { return costs[static_cast<std::size_t>(item)]; }
};

void check(std::span<const double> costs, std::span<const double> targets, std::span<const ItemShape> shapes) {
  const auto sane = [](double value) { return std::isfinite(value) && value >= 0.0; };
  for (std::size_t k = 0; k < costs.size(); ++k) {
    if (sane(costs[k])) continue;
    refuse("the cost of item {} is {}; costs are finite and not negative", k, costs[k]);
  }
  if (shapes.size() != targets.size()) refuse("arrange_items: {} shapes for {} devices", shapes.size(), targets.size());
  for (std::size_t d = 0; d < targets.size(); ++d) {
    if (sane(targets[d])) continue;
    refuse("arrange_items: the target of device {} is {}; it is finite and not negative", d, targets[d]);
  }
  if (std::ranges::none_of(targets, [](double target) { return target > 0.0; }))
    refuse("arrange_items: no device has a target above 0");
}

class Arranger {
 public:
  Arranger(std::span<const double> costs, std::span<const double> targets, std::span<const ItemShape> shapes,
           const ArrangeOptions& options)
      : cost_{costs},
        device_count_(targets.size()),
        pack_{.max_items = options.max_items, .min_items = options.min_items},
        plain_costs_(options.plain_costs),
        order_(costs.size()) {
    for (std::size_t d = 0; d < targets.size(); ++d) {
      if (targets[d] > 0.0) devices_.push_back({.index = d, .target = targets[d], .shape = shapes[d]});
    }
    std::iota(order_.begin(), order_.end(), 0);
    std::ranges::stable_sort(order_, std::ranges::greater{}, cost_);
  }

  ItemArrangement run() {
    if (devices_.size() == 1) return arranged(packed({order_}));
    const std::vector<double> padded = padded_costs();
    std::vector<double> rates;
    for (const Device& device : devices_) rates.push_back(device.target);
    Devices best;
    for (int round = 0; round < kDealingRounds; ++round) {
      Devices next = packed(dealt(padded, rates));
      const bool more = !plain_costs_ && correct(rates, next);
      if (best.empty() || latest_of(next) < latest_of(best)) best = std::move(next);
      if (!more) break;
    }
    return arranged(best);
  }

 private:
  /// What each item adds to the time if the whole batch is packed and each device has a part of every micro-batch.
  /// Plain costs stay as they are.
  [[nodiscard]] std::vector<double> padded_costs() const {
    std::vector<double> padded(cost_.costs.begin(), cost_.costs.end());
    double sum = std::accumulate(padded.begin(), padded.end(), 0.0);
    if (!plain_costs_) {
      // It uses the shape of the device with most work. Other classes differ, and the rounds correct that.
      ItemShape shape = std::ranges::max_element(devices_, {}, &Device::target)->shape;
      shape.cost.fixed_seconds *= static_cast<double>(devices_.size());
      PackOptions pack{.min_items = pack_.min_items};
      pack.least_fixed *= static_cast<double>(devices_.size());
      const bool pads = shape.measure == ItemMeasure::padded;
      const std::vector<std::int64_t> bounds = pads ? pack_items(lengths_of(order_), shape, pack) : Items{};
      sum = 0.0;
      std::size_t piece = 0;
      for (std::size_t k = 0; k < order_.size(); ++k) {
        if (piece + 1 < bounds.size() && std::cmp_equal(k, bounds[piece + 1])) ++piece;
        const std::int64_t longest = order_[pads ? static_cast<std::size_t>(bounds[piece]) : k];
        sum += padded[static_cast<std::size_t>(order_[k])] = shape.item(cost_(longest));
      }
    }
    const double least = sum > 0.0 ? kLeastCost * sum / static_cast<double>(padded.size()) : 1.0;
    for (double& cost : padded) cost += least;
    return padded;
  }

  [[nodiscard]] std::vector<double> lengths_of(const Items& items) const {
    std::vector<double> lengths(items.size());
    std::ranges::transform(items, lengths.begin(), cost_);
    return lengths;
  }

  /// Per device, its items by descending cost.
  [[nodiscard]] std::vector<Items> dealt(const std::vector<double>& padded, const std::vector<double>& rates) const {
    std::vector<LoadModel> models;
    for (const double rate : rates) models.push_back({0.0, 1.0 / rate});
    std::vector<Items> items = split_items(padded, models, kSplitTolerance).items;
    for (Items& mine : items) std::ranges::stable_sort(mine, std::ranges::greater{}, cost_);
    // A device without items is not measured, and nobody would notice that it has become fast. A device that cannot get
    // enough items for a micro-batch gets none.
    const auto least = static_cast<std::size_t>(pack_.min_items);
    for (Items& mine : items) {
      if (mine.size() >= least) continue;
      const std::size_t lacking = least - mine.size();
      Items& most = *std::ranges::max_element(items, {}, std::ranges::size);
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
    const auto had = std::ssize(to);
    to.insert(to.end(), from.end() - static_cast<std::ptrdiff_t>(count), from.end());
    from.resize(from.size() - count);
    std::ranges::inplace_merge(to, to.begin() + had, std::ranges::greater{}, cost_);
  }

  /// The items of each device, packed. If padding has made the split uneven, it is levelled.
  [[nodiscard]] Devices packed(const std::vector<Items>& items) const {
    Devices devices = devices_;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      const std::vector<double> lengths = lengths_of(items[d]);
      const std::vector<std::int64_t> bounds = pack_items(lengths, devices[d].shape, pack_);
      for (std::size_t k = 0; k + 1 < bounds.size(); ++k) {
        devices[d].work += devices[d].shape.micro_batch({lengths.begin() + bounds[k], lengths.begin() + bounds[k + 1]});
        devices[d].micro_batches.emplace_back(items[d].begin() + bounds[k], items[d].begin() + bounds[k + 1]);
      }
    }
    const auto pads = [](const Device& device) { return device.shape.measure == ItemMeasure::padded; };
    if (!plain_costs_ && std::ranges::all_of(devices, pads)) level(devices);
    return devices;
  }

  /// Evens out a split that packing has made uneven. Items go one by one from the latest device to the earliest one, as
  /// long as the later of the two gets earlier. It gains 2 %.
  ///
  /// This is for items that are padded to the longest. An item that is not the longest of its micro-batch takes as much
  /// time as the longest one, there and in the micro-batch that takes it. So the effect of a move is known without
  /// packing anew. Micro-batches and their longest items stay.
  void level(Devices& devices) const {
    for (int moves = 0; moves < kMostMoves; ++moves) {
      Device& giver = *std::ranges::max_element(devices, {}, &Device::time);
      Device& taker = *std::ranges::min_element(devices, {}, &Device::time);
      // The shortest item of each micro-batch is a candidate. Moving another one would change the time equally.
      double least = kWorthIt * giver.time();
      Items* from = nullptr;
      Items* to = nullptr;
      double given = 0.0;
      double taken = 0.0;
      for (Items& items : giver.micro_batches) {
        if (std::ssize(items) <= pack_.min_items) continue;
        Items* const place = place_in(taker, cost_(items.back()));
        if (place == nullptr) continue;
        const double less = giver.shape.item(cost_(items.front()));
        const double more = taker.shape.item(cost_(place->front()));
        const double later = std::max((giver.work - less) / giver.target, (taker.work + more) / taker.target);
        if (later >= least) continue;
        std::tie(least, from, to, given, taken) = std::tuple(later, &items, place, less, more);
      }
      if (from == nullptr) return;
      const std::int64_t item = from->back();
      from->pop_back();
      to->insert(std::ranges::upper_bound(*to, cost_(item), std::ranges::greater{}, cost_), item);
      giver.work -= given;
      taker.work += taken;
    }
  }

  /// The last micro-batch whose longest item is at least as long as the item, if it has room.
  [[nodiscard]] Items* place_in(Device& device, double length) const {
    for (Items& items : std::views::reverse(device.micro_batches)) {
      if (cost_(items.front()) >= length && std::ssize(items) < pack_.max_items) return &items;
    }
    return nullptr;
  }

  [[nodiscard]] ItemArrangement arranged(const Devices& devices) const {
    ItemArrangement result;
    result.order.reserve(cost_.costs.size());
    result.bounds.push_back(0);
    result.work.assign(device_count_, 0.0);
    for (const Device& device : devices) {
      result.first.resize(device.index + 1, result.bounds.size() - 1);
      for (const Items& items : device.micro_batches) {
        result.order.insert(result.order.end(), items.begin(), items.end());
        result.bounds.push_back(std::ssize(result.order));
      }
      result.work[device.index] = device.work;
    }
    result.first.resize(device_count_ + 1, result.bounds.size() - 1);
    return result;
  }

  static double latest_of(const Devices& devices) {
    return std::ranges::max_element(devices, {}, &Device::time)->time();
  }

  /// Changes the rates by how far off the work is. Returns false if nothing is left to gain.
  static bool correct(std::vector<double>& rates, const Devices& devices) {
    double work = 0.0;
    double targets = 0.0;
    for (const Device& device : devices) {
      work += device.work;
      targets += device.target;
    }
    if (!(work > 0.0) || latest_of(devices) <= (1.0 + kEvenEnough) * work / targets) return false;
    for (std::size_t d = 0; d < devices.size(); ++d) {
      const double ratio = devices[d].time() * targets / work;
      rates[d] /= std::clamp(ratio, 0.5, 2.0);  // single items far beyond a target cannot be corrected
    }
    return true;
  }

  CostOf cost_;
  std::size_t device_count_;
  PackOptions pack_;
  bool plain_costs_;
  Devices devices_;  // without items
  Items order_;      // all items by descending cost
};

}  // namespace

ItemArrangement arrange_items(std::span<const double> costs, std::span<const double> targets,
                              std::span<const ItemShape> shapes, const ArrangeOptions& options) {
  check(costs, targets, shapes);
  return Arranger(costs, targets, shapes, options).run();
}

}  // namespace paceline::plan
