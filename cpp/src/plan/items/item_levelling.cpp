// SPDX-License-Identifier: Apache-2.0
#include "plan/items/item_levelling.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>

namespace paceline::plan {
namespace {

constexpr int kMostMoves = 256;          // of some microseconds each; more would gain nothing that can be measured
constexpr double kWorthIt = 1.0 - 1e-4;  // of the later of the two

struct Move {
  std::size_t from = 0;  // micro-batch of the giver
  std::size_t to = 0;    // and of the taker
  double given = 0.0;
  double taken = 0.0;
};

class Levelling {
 public:
  Levelling(std::vector<PackedDevice>& devices, std::span<const double> costs, std::span<const ItemShape> shapes,
            std::span<const double> speeds, const PackOptions& options)
      : devices_(devices), costs_(costs), shapes_(shapes), speeds_(speeds), options_(options) {}

  void run() {
    for (int moves = 0; moves < kMostMoves; ++moves) {
      std::size_t latest = 0;
      std::size_t earliest = 0;
      for (std::size_t d = 1; d < devices_.size(); ++d) {
        if (time(d, devices_[d].work) > time(latest, devices_[latest].work)) latest = d;
        if (time(d, devices_[d].work) < time(earliest, devices_[earliest].work)) earliest = d;
      }
      const std::optional<Move> move = best(latest, earliest);
      if (!move) return;
      apply(latest, earliest, *move);
    }
  }

 private:
  [[nodiscard]] double time(std::size_t device, double work) const { return work / speeds_[device]; }
  [[nodiscard]] double cost(std::int64_t item) const { return costs_[static_cast<std::size_t>(item)]; }

  /// The shortest item of each micro-batch is a candidate. Moving another one would change the time equally.
  [[nodiscard]] std::optional<Move> best(std::size_t giver, std::size_t taker) const {
    double least = kWorthIt * time(giver, devices_[giver].work);
    std::optional<Move> found;
    for (std::size_t g = 0; g < devices_[giver].micro_batches.size(); ++g) {
      const std::vector<std::int64_t>& from = devices_[giver].micro_batches[g];
      if (static_cast<std::int64_t>(from.size()) <= options_.min_items) continue;
      const std::optional<std::size_t> h = place(taker, cost(from.back()));
      if (!h) continue;
      Move move{g, *h};
      move.given = shapes_[giver].item(cost(from.front()));
      move.taken = shapes_[taker].item(cost(devices_[taker].micro_batches[*h].front()));
      const double later =
          std::max(time(giver, devices_[giver].work - move.given), time(taker, devices_[taker].work + move.taken));
      if (later >= least) continue;
      least = later;
      found = move;
    }
    return found;
  }

  /// The last micro-batch whose longest item is at least as long as the item, if it has room.
  [[nodiscard]] std::optional<std::size_t> place(std::size_t device, double length) const {
    const auto& micro_batches = devices_[device].micro_batches;
    for (std::size_t h = micro_batches.size(); h-- > 0;) {
      if (cost(micro_batches[h].front()) < length) continue;
      if (static_cast<std::int64_t>(micro_batches[h].size()) < options_.max_items) return h;
    }
    return std::nullopt;
  }

  void apply(std::size_t giver, std::size_t taker, const Move& move) {
    std::vector<std::int64_t>& from = devices_[giver].micro_batches[move.from];
    std::vector<std::int64_t>& to = devices_[taker].micro_batches[move.to];
    const std::int64_t item = from.back();
    from.pop_back();
    to.insert(
        std::upper_bound(to.begin(), to.end(), item, [&](std::int64_t a, std::int64_t b) { return cost(a) > cost(b); }),
        item);
    devices_[giver].work -= move.given;
    devices_[taker].work += move.taken;
  }

  std::vector<PackedDevice>& devices_;
  std::span<const double> costs_;
  std::span<const ItemShape> shapes_;
  std::span<const double> speeds_;
  const PackOptions& options_;
};

}  // namespace

void level_items(std::vector<PackedDevice>& devices, std::span<const double> costs, std::span<const ItemShape> shapes,
                 std::span<const double> speeds, const PackOptions& options) {
  Levelling(devices, costs, shapes, speeds, options).run();
}

}  // namespace paceline::plan
