// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "plan/numbers.hpp"
#include "plan/stages/stage_search.hpp"

namespace paceline::plan {
namespace {

// Stages that are placed and actions that are replayed: a few milliseconds, and all that there are in small problems.
constexpr std::int64_t kMostSteps = 2'000'000;
// Partitions are few enough for looking at those, too, whose usual depths are this much worse. Of so few partitions all
// are looked at.
constexpr double kWorthTrying = 1.05;
constexpr double kFewPartitions = 5000;
// With more partitions than this, the search would end among the first of them.
constexpr double kMostPartitions = 2e7;

/// How many partitions there are, without what memory forbids.
double partition_count(const StageSearch& search) {
  const auto blocks = static_cast<double>(search.costs.blocks());
  const auto devices = static_cast<double>(search.costs.devices());
  const std::size_t given = std::max(search.options.cuts.size(), search.options.order.size());
  double count = 0.0;
  double orders = 1.0;
  double ways = 1.0;  // to cut
  for (double stages = 1; stages <= std::min(blocks, devices); ++stages) {
    orders *= devices - stages + 1.0;
    if (stages > 1) ways *= (blocks - stages + 1.0) / (stages - 1.0);
    if (given > 0 && static_cast<double>(given) != stages) continue;
    count += (search.options.order.empty() ? orders : 1.0) * (search.options.cuts.empty() ? ways : 1.0);
  }
  return count;
}

/// Goes through partitions stage by stage. Leaves out those whose first stages show that they cannot win.
class Enumeration {
 public:
  /// `worth`: how many times as long a partition with usual depths may take. `most_steps`: when to give up.
  Enumeration(const StageSearch& search, std::int64_t micro_batches, double worth, std::int64_t most_steps)
      : search_(search),
        sizes_(search.costs.problem().batch_size, micro_batches),
        last_(sizes_.larger_count == sizes_.count ? sizes_.larger : sizes_.smaller),
        worth_(worth),
        most_steps_(most_steps),
        actions_(search.clock.actions()),
        used_(search.costs.devices(), 0) {
    for (const StageDevice& device : search.costs.problem().devices) speeds_ += device.speed;
  }

  void run() { place(0, 0.0); }

  [[nodiscard]] std::int64_t steps() const { return steps_ + search_.clock.actions() - actions_; }

 private:
  [[nodiscard]] bool spent() const { return steps() > most_steps_; }

  /// Whether an equal device, which is not used either, comes before this one.
  [[nodiscard]] bool repeats(std::size_t device) const {
    if (!search_.options.previous_cuts.empty() || !search_.options.order.empty()) return false;
    for (std::size_t other = search_.costs.device_class(device); other < device; ++other)
      if (used_[other] == 0 && search_.costs.device_class(other) == search_.costs.device_class(device)) return true;
    return false;
  }

  /// `around`: what the first micro-batch takes to get here, and the last one to get back.
  void place(std::size_t from, double around) {
    const std::size_t stage = partition_.stages();
    const StageOptions& options = search_.options;
    if (from == search_.costs.blocks()) {
      if (!options.order.empty() && options.order.size() != stage) return;
      (void)search_.offer(partition_, sizes_.count, search_.finalists.limit() * worth_);
      return;
    }
    for (std::size_t device = 0; device < used_.size(); ++device) {
      if (used_[device] != 0 || !search_.fits_options(stage, device) || repeats(device) || spent()) continue;
      used_[device] = 1;
      partition_.cuts.push_back(from);
      partition_.order.push_back(device);
      double come = around;
      if (stage > 0) {
        const std::size_t source = partition_.order[stage - 1];
        come +=
            search_.costs.send(from, source, device, sizes_.larger) + search_.costs.send(from, source, device, last_);
      }
      speeds_ -= search_.costs.problem().devices[device].speed;
      extend(from, device, come);
      speeds_ += search_.costs.problem().devices[device].speed;
      partition_.cuts.pop_back();
      partition_.order.pop_back();
      used_[device] = 0;
    }
  }

  /// Tries all ends of the stage that was begun last. `come` as `around`, with the way to its device.
  void extend(std::size_t from, std::size_t device, double come) {
    const StageCosts& costs = search_.costs;
    const StageOptions& options = search_.options;
    const std::size_t stage = partition_.stages() - 1;
    const std::size_t blocks = costs.blocks();
    const auto items = static_cast<double>(costs.problem().batch_size);
    const auto runs = static_cast<double>(sizes_.count);
    for (std::size_t to = from + 1; to <= blocks && !spent(); ++to) {
      if (!options.cuts.empty() && to != (stage + 1 < options.cuts.size() ? options.cuts[stage + 1] : blocks)) continue;
      ++steps_;
      const double limit = search_.finalists.limit();
      if (costs.work(from, to, device, items, runs) + come > limit) return;
      const double next = come + costs.forward(from, to, device, static_cast<double>(sizes_.larger)) +
                          costs.backward(from, to, device, static_cast<double>(last_));
      // What is left, on all devices that are left, if none of them ever waited.
      const double rest = costs.work(to, blocks, device, items, runs) * costs.problem().devices[device].speed;
      if (to < blocks && !(rest <= (limit - next) * speeds_ * (1.0 + kTie))) continue;
      place(to, next);
    }
  }

  const StageSearch& search_;
  const BatchSizes sizes_;
  const std::int64_t last_;  // items of the last micro-batch
  const double worth_;
  const std::int64_t most_steps_;
  const std::int64_t actions_;
  std::int64_t steps_ = 0;
  double speeds_ = 0.0;  // of all devices that are not used
  std::vector<char> used_;
  Partition partition_;
};

}  // namespace

void try_partitions(const StageSearch& search, const std::vector<std::int64_t>& micro_batches) {
  const double count = partition_count(search);
  if (count > kMostPartitions) return;
  const bool few = count * static_cast<double>(micro_batches.size()) <= kFewPartitions;
  std::int64_t left = kMostSteps;
  for (const std::int64_t m : micro_batches) {
    if (left <= 0) return;
    Enumeration enumeration(search, m, few ? kInfinity : kWorthTrying, left);
    enumeration.run();
    left -= enumeration.steps();
  }
}

}  // namespace paceline::plan
