// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <vector>

#include "plan/stages/stage_search.hpp"

namespace paceline::plan {
namespace {

// Most of what is counted falls to the bound, so this many take a few milliseconds.
constexpr double kMostPlans = 200'000;
// Steps of the search through partitions with good depths: a few milliseconds.
constexpr std::int64_t kMostDepthSteps = 2'000'000;
// Partitions are few enough for looking at those, too, whose usual depths are this much worse.
constexpr double kWorthTrying = 1.05;
// With more partitions than this, the search would end among the first of them.
constexpr double kMostPartitions = 2e7;

double choose(double n, double k) {
  double ways = 1.0;
  for (double i = 0; i < k; ++i) ways *= (n - i) / (i + 1.0);
  return ways;
}

/// How many plans there are with these numbers of micro-batches, without what memory forbids. `depths`: how many of
/// each number of micro-batches and stages.
template <class Depths>
double plan_count(const StageSearch& search, const std::vector<std::int64_t>& micro_batches, const Depths& depths) {
  const auto blocks = static_cast<double>(search.costs.blocks());
  const auto devices = static_cast<double>(search.costs.devices());
  double count = 0.0;
  double orders = 1.0;
  for (double stages = 1; stages <= std::min(blocks, devices); ++stages) {
    orders *= devices - stages + 1.0;
    const auto given =
        static_cast<double>(search.options.cuts.empty() ? search.options.order.size() : search.options.cuts.size());
    if (given > 0 && given != stages) continue;
    const double partitions = (search.options.order.empty() ? orders : 1.0) *
                              (search.options.cuts.empty() ? choose(blocks - 1.0, stages - 1.0) : 1.0);
    for (const std::int64_t m : micro_batches) count += partitions * depths(static_cast<double>(m), stages);
  }
  return count;
}

/// Goes through partitions stage by stage. Leaves out those whose first stages show that they cannot win.
class Enumeration {
 public:
  /// `most_steps`: when to give up, in stages that were placed and actions that were replayed; 0: never.
  Enumeration(const StageSearch& search, std::int64_t micro_batches, std::int64_t most_steps)
      : search_(search),
        sizes_(search.costs.problem().batch_size, micro_batches),
        last_(sizes_.larger_count == sizes_.count ? sizes_.larger : sizes_.smaller),
        most_steps_(most_steps),
        actions_(search.clock.actions()),
        used_(search.costs.devices(), 0) {
    for (const StageDevice& device : search.costs.problem().devices) speeds_ += device.speed;
  }

  void run() { place(0, 0.0); }

  [[nodiscard]] std::int64_t steps() const { return steps_ + search_.clock.actions() - actions_; }

 private:
  [[nodiscard]] bool spent() const { return most_steps_ > 0 && steps() > most_steps_; }

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
      if (most_steps_ == 0) {
        search_.offer_all(partition_, sizes_.count);
      } else {
        (void)search_.offer(partition_, sizes_.count, search_.finalists.best_seconds() * kWorthTrying);
      }
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
  const std::int64_t most_steps_;
  const std::int64_t actions_;
  std::int64_t steps_ = 0;
  double speeds_ = 0.0;  // of all devices that are not used
  std::vector<char> used_;
  Partition partition_;
};

}  // namespace

bool try_all(const StageSearch& search, const std::vector<std::int64_t>& micro_batches) {
  const auto depths = [](double m, double stages) { return choose(m + stages - 2.0, stages - 1.0); };
  if (plan_count(search, micro_batches, depths) > kMostPlans) return false;
  for (const std::int64_t m : micro_batches) Enumeration(search, m, 0).run();
  return true;
}

void try_partitions(const StageSearch& search, const std::vector<FoundPlan>& starts) {
  if (plan_count(search, {1}, [](double, double) { return 1.0; }) > kMostPartitions) return;
  std::int64_t left = kMostDepthSteps;
  std::vector<std::int64_t> done;
  for (const FoundPlan& start : starts) {
    if (left <= 0) return;
    if (std::ranges::count(done, start.micro_batches) > 0) continue;
    done.push_back(start.micro_batches);
    Enumeration enumeration(search, start.micro_batches, left);
    enumeration.run();
    left -= enumeration.steps();
  }
}

}  // namespace paceline::plan
