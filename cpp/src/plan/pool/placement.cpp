// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

// The device to which a job is bound; kNone: whichever is free. Equals take turns: the first of them from `next_turn`
// on.
std::size_t State::choose_at_submit(const Job& job, double now) {
  const Placement placement = options.placement;
  if (!binds()) return kNone;
  const std::size_t kind = job.kind;
  std::size_t best = kNone;
  double least = kNever;
  double weights = 0.0;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const std::size_t d = (next_turn + i) % devices.size();
    Device& device = devices[d];
    if (!device.active || !accepts(job.need, d) || largest(kind, d) == 0) continue;
    double cost = 0.0;
    const double own = seconds(kind, d, kinds[kind].cost);
    if (placement == Placement::round_robin) {
      cost = 0.0;
    } else if (placement == Placement::weighted) {  // smooth weighted round robin, as nginx has it
      const double weight = device.spec.weight > 0.0 ? device.spec.weight : own > 0.0 ? 1.0 / own : 1.0;
      weights += weight;
      device.turn += weight;
      cost = -device.turn;
    } else if (placement == Placement::least_outstanding || !(own >= 0.0)) {
      cost = static_cast<double>(device.bound);
    } else {
      cost = seconds(kind, d, job.cost) + load_seconds(kind, d);
      for (const std::size_t at : active_lines) {
        const PoolLine& line = lines[at];
        const double each = line.bound == d ? seconds(line.kind, d, kinds[line.kind].cost) : 0.0;
        if (each > 0.0) cost += each * units(line);
      }
      // A run that lasts longer than predicted is taken to last a tenth of the prediction more.
      if (device.run != RunId{} && std::isfinite(device.free_at))
        cost += std::max(device.free_at - now, 0.1 * run_of(device).predicted);
    }
    if (best == kNone || cost < least) {
      least = cost;
      best = d;
    }
  }
  if (placement == Placement::weighted && best != kNone) devices[best].turn -= weights;
  if (best != kNone && placement != Placement::earliest_finish && placement != Placement::weighted)
    next_turn = (best + 1) % devices.size();
  return best;
}

}  // namespace paceline::plan
