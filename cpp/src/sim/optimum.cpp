// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include <paceline/plan/split.hpp>
#include <paceline/sim/scenario.hpp>

namespace paceline::sim {
namespace {

using Shares = std::vector<std::int64_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// What these shares lose in a step; infinity if a device with a share has failed.
double loss_of(const Box& box, std::int64_t step, const Shares& shares, double ideal) {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] > 0 && !box.alive(i, step)) return kInfinity;
  }
  return box.makespan(step, shares) / ideal - 1.0;
}

}  // namespace

Optimum optimum(const SimulationOptions& options) {
  const Box box(options.box);
  const auto steps = static_cast<double>(options.steps);
  std::vector<double> ideals;
  std::set<Shares> candidates;
  double late = 0.0;
  Shares yesterday = plan::split_even(options.batch_size, static_cast<std::int64_t>(options.box.devices.size()));
  for (std::int64_t step = 0; step < options.steps; ++step) {
    Shares best = box.best_split(step, options.batch_size);
    const double ideal = ideals.emplace_back(box.makespan(step, best));
    // The step in which a device fails is lost. Only its repetition counts, and that knows of the failure.
    const double loss = loss_of(box, step, yesterday, ideal);
    if (loss < kInfinity) late += loss / steps;
    candidates.insert(best);
    yesterday = std::move(best);
  }
  double fixed = kInfinity;
  for (const Shares& shares : candidates) {
    double loss = 0.0;
    for (std::int64_t step = 0; step < options.steps && loss < fixed; ++step) {
      loss += loss_of(box, step, shares, ideals[static_cast<std::size_t>(step)]) / steps;
    }
    fixed = std::min(fixed, loss);
  }
  if (fixed <= late) return {fixed, "computed: the best single split in hindsight"};
  return {late, "computed: the exact split, one step late"};
}

}  // namespace paceline::sim
