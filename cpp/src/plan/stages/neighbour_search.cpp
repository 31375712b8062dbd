// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <vector>

#include "plan/stages/stage_search.hpp"

namespace paceline::plan {
namespace {

// Actions that the recurrence goes through in all: a few milliseconds for few devices, half a second for many.
constexpr std::int64_t kFewActions = 5'000'000;
constexpr std::int64_t kManyActions = 60'000'000;
constexpr std::size_t kFewDevices = 8;

class Neighbours {
 public:
  explicit Neighbours(const StageSearch& search) : search_(search) {
    most_actions_ = search.clock.actions() + (search.costs.devices() <= kFewDevices ? kFewActions : kManyActions);
  }

  /// Goes from a plan to better ones until no neighbour is better. `most_actions`: when to give up.
  void improve(const FoundPlan& start, std::int64_t most_actions) {
    most_actions_ = search_.clock.actions() + most_actions;
    next_ = start;
    do {
      now_ = next_;
      around(now_.partition, now_.micro_batches);
    } while (better() && !spent());
  }

 private:
  [[nodiscard]] bool spent() const { return search_.clock.actions() > most_actions_; }
  [[nodiscard]] bool better() const { return next_.seconds < now_.seconds * (1.0 - kTie); }

  /// Nothing more is offered once something better is found: its own neighbours come next.
  void offer(const Partition& partition, std::int64_t m) {
    if (spent() || better()) return;
    Depths depths = search_.offer(partition, m, now_.seconds * kPromising, now_.depths);
    if (depths.seconds < next_.seconds) next_ = {partition, m, std::move(depths.depths), depths.seconds, 0};
  }

  void around(const Partition& partition, std::int64_t m) {
    const StageOptions& options = search_.options;
    if (options.cuts.empty()) shift_cuts(partition, m);
    if (options.order.empty()) other_devices(partition, m);
    if (options.cuts.empty() && options.order.empty()) other_stages(partition, m);
    if (!options.micro_batches) other_micro_batches(partition, m);
  }

  /// Moves blocks from one stage to another; all cuts between them shift.
  void shift_cuts(const Partition& partition, std::int64_t m) {
    const std::size_t stages = partition.stages();
    for (std::size_t first = 1; first < stages; ++first) {
      for (std::size_t last = first; last < stages; ++last) {
        for (const std::ptrdiff_t change : {1, -1, 2, -2}) {
          Partition other = partition;
          for (std::size_t i = first; i <= last; ++i)
            other.cuts[i] = static_cast<std::size_t>(static_cast<std::ptrdiff_t>(other.cuts[i]) + change);
          const std::size_t end = last + 1 < stages ? other.cuts[last + 1] : search_.costs.blocks();
          const bool room = static_cast<std::ptrdiff_t>(partition.cuts[first]) + change >
                            static_cast<std::ptrdiff_t>(partition.cuts[first - 1]);
          if (room && other.cuts[last] < end) offer(other, m);
        }
      }
    }
  }

  [[nodiscard]] std::vector<std::size_t> unused(const Partition& partition) const {
    std::vector<std::size_t> devices;
    for (std::size_t device = 0; device < search_.costs.devices(); ++device)
      if (std::ranges::count(partition.order, device) == 0) devices.push_back(device);
    return devices;
  }

  /// Whether it makes no difference which of two devices is used.
  [[nodiscard]] bool alike(std::size_t a, std::size_t b) const {
    return search_.options.previous_cuts.empty() && search_.costs.device_class(a) == search_.costs.device_class(b);
  }

  /// Swaps two devices, with and without their numbers of blocks; replaces one by one that is not used.
  void other_devices(const Partition& partition, std::int64_t m) {
    const std::size_t stages = partition.stages();
    for (std::size_t i = 0; i < stages; ++i) {
      for (std::size_t j = i + 1; j < stages; ++j) {
        if (alike(partition.order[i], partition.order[j])) continue;
        Partition other = partition;
        std::swap(other.order[i], other.order[j]);
        offer(other, m);
        if (!search_.options.cuts.empty()) continue;
        const std::size_t end = j + 1 < stages ? partition.cuts[j + 1] : search_.costs.blocks();
        const std::size_t of_i = partition.cuts[i + 1] - partition.cuts[i];
        const std::size_t of_j = end - partition.cuts[j];
        for (std::size_t cut = i + 1; cut <= j; ++cut) other.cuts[cut] = partition.cuts[cut] + of_j - of_i;
        offer(other, m);
      }
      for (const std::size_t device : unused(partition)) {
        if (alike(device, partition.order[i])) continue;
        Partition other = partition;
        other.order[i] = device;
        offer(other, m);
      }
    }
  }

  /// Leaves a device out, or lets another one have half of a stage.
  void other_stages(const Partition& partition, std::int64_t m) {
    const std::size_t stages = partition.stages();
    const std::vector<std::size_t> spare = unused(partition);
    for (std::size_t i = 0; i < stages; ++i) {
      const auto at = static_cast<std::ptrdiff_t>(i);
      const std::size_t from = partition.cuts[i];
      const std::size_t end = i + 1 < stages ? partition.cuts[i + 1] : search_.costs.blocks();
      if (stages > 1) {
        Partition other = partition;
        other.order.erase(other.order.begin() + at);
        other.cuts.erase(other.cuts.begin() + std::max<std::ptrdiff_t>(at, 1));
        offer(other, m);
      }
      if (end - from < 2) continue;
      for (const std::size_t device : spare) {
        for (const std::ptrdiff_t place : {at, at + 1}) {
          Partition other = partition;
          other.cuts.insert(other.cuts.begin() + at + 1, from + (end - from) / 2);
          other.order.insert(other.order.begin() + place, device);
          offer(other, m);
        }
      }
    }
  }

  void other_micro_batches(const Partition& partition, std::int64_t m) {
    const std::int64_t batch = search_.costs.problem().batch_size;
    const std::int64_t size = (batch - 1) / m + 1;
    for (const std::int64_t other : {m - 1, m + 1, m - m / 10, m + m / 10, (batch - 1) / (size + 1) + 1,
                                     size > 1 ? (batch - 1) / (size - 1) + 1 : batch})
      if (other >= 1 && other <= batch && other != m) offer(partition, other);
  }

  const StageSearch& search_;
  std::int64_t most_actions_ = 0;
  FoundPlan now_;
  FoundPlan next_;  // the best neighbour so far
};

}  // namespace

void try_neighbours(const StageSearch& search, const std::vector<FoundPlan>& starts) {
  const std::int64_t actions = search.costs.devices() <= kFewDevices ? kFewActions : kManyActions;
  Neighbours neighbours(search);
  for (const FoundPlan& start : starts) neighbours.improve(start, actions / static_cast<std::int64_t>(starts.size()));
}

}  // namespace paceline::plan
