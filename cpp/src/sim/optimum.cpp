// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <set>
#include <vector>

#include <paceline/plan/split.hpp>
#include <paceline/sim/scenario.hpp>

namespace paceline::sim {
namespace {

using Shares = std::vector<std::int64_t>;

bool all_alive(const Box& box, std::int64_t step, const Shares& shares) {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] > 0 && !box.alive(i, step)) return false;
  }
  return true;
}

}  // namespace

Optimum optimum(const SimulationOptions& options) {
  const Box box(options.box);
  const auto steps = static_cast<double>(options.steps);
  std::vector<double> ideals;
  std::set<Shares> candidates;
  double late = 0.0;
  Shares yesterday = plan::split_even(options.batch_size, static_cast<std::int64_t>(options.box.devices.size()));
  std::vector<plan::CostModel> known;
  std::vector<bool> alive;
  std::vector<double> late_starts;
  Shares best;
  double ideal = 0.0;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    std::vector<plan::CostModel> truth = box.models(step);
    std::vector<bool> here;
    for (std::size_t i = 0; i < truth.size(); ++i) here.push_back(box.alive(i, step));
    std::vector<double> begin = box.late(step);
    if (truth != known || here != alive || begin != late_starts) {
      best = box.best_split(step, options.batch_size);
      ideal = box.makespan(step, best);
      candidates.insert(best);
    }
    known = std::move(truth);
    alive = std::move(here);
    late_starts = std::move(begin);
    ideals.push_back(ideal);
    // The step in which a device fails is lost. Only its repetition counts, and that knows of the failure.
    if (all_alive(box, step, yesterday)) late += (box.makespan(step, yesterday) / ideal - 1.0) / steps;
    yesterday = best;
  }
  double fixed = std::numeric_limits<double>::infinity();
  for (const Shares& shares : candidates) {
    double loss = 0.0;
    for (std::int64_t step = 0; step < options.steps && loss < fixed; ++step) {
      if (!all_alive(box, step, shares)) {
        loss = std::numeric_limits<double>::infinity();
      } else {
        loss += (box.makespan(step, shares) / ideals[static_cast<std::size_t>(step)] - 1.0) / steps;
      }
    }
    fixed = std::min(fixed, loss);
  }
  if (fixed <= late) return {fixed, "computed: the best single split in hindsight"};
  return {late, "computed: the exact split, one step late"};
}

}  // namespace paceline::sim
