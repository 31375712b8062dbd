// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

// Starts the gang if enough devices are idle. Otherwise the first gang in the order of keys reserves the devices that
// are free first, and others may start there only what ends before (EASY backfilling: Lifka, 1995). One gang reserves
// at a time, so no two of them hold devices that the other one needs.
bool State::gang_step(JobId id, double now, PoolDecisions& out) {
  Job& job = jobs.at(id);
  const std::size_t kind = job.kind;
  const std::size_t size = static_cast<std::size_t>(job.gang);
  const bool background = job.background;
  std::vector<std::pair<double, std::size_t>> idle_ones;  // by seconds
  std::vector<std::pair<double, std::size_t>> all;        // by when they are free
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (!can_use(job, d)) continue;
    if (background && foreground_waits(d)) continue;
    const bool busy = devices[d].run != RunId{};
    all.emplace_back(busy ? std::max(devices[d].free_at - now, 0.0) : 0.0, d);
    if (busy || (reserving != JobId{} && reserved[d] != 0) || !room(kind, d, 1)) continue;
    const double alone = seconds(kind, d, job.cost);
    idle_ones.emplace_back(alone >= 0.0 ? alone + load_seconds(kind, d) : 0.0, d);
  }
  std::stable_sort(idle_ones.begin(), idle_ones.end());
  if (idle_ones.size() >= size) {
    PoolStart start{.kind = kind, .cost = job.cost, .predicted_seconds = 0.0};
    // Members may share one memory: those that are chosen are in the books before the next one is asked.
    std::vector<Space> before = spaces;
    for (auto one = idle_ones.begin(); one != idle_ones.end() && start.devices.size() < size; ++one) {
      const auto [longest, d] = *one;
      if (now + kinds[kind].margin * longest > job.deadline || !room(kind, d, 1)) continue;
      const double alone = seconds(kind, d, job.cost);
      start.predicted_seconds = alone >= 0.0 ? std::max(start.predicted_seconds, alone) : alone;  // NaN stays
      start.load_seconds = std::max(start.load_seconds, take_room(kind, d, 1, start));
      if (start.devices.empty()) {
        start.run = next_run(d);
        devices[d].current = {.jobs = {id}, .kind = kind, .peak_bytes = peak(kind, 1)};
      }
      start.devices.push_back(d);
      devices[d].run = start.run;
    }
    const bool fits = start.devices.size() == size;
    if (fits) {
      start.jobs = {id};
      Run& run = devices[start.devices.front()].current;
      run.devices = start.devices;
      run.predicted = start.predicted_seconds;
      start_jobs(start.jobs, nullptr, JobId{});
      for (const std::size_t d : start.devices) {
        devices[d].free_at =
            start.predicted_seconds >= 0.0 ? now + start.load_seconds + start.predicted_seconds : kNever;
        devices[d].declines_since = kNever;
      }
      idle -= size;
      ++running;
      out.starts.push_back(std::move(start));
      return true;
    }
    for (const std::size_t d : start.devices) devices[d].run = RunId{};
    spaces = std::move(before);
  }
  if (background || reserving != JobId{} || all.size() < size) return false;
  std::stable_sort(all.begin(), all.end());
  std::vector<char> taken(devices.size(), 0);
  std::vector<std::int64_t> in_space(spaces.size(), 0);
  std::size_t count = 0;
  double wait = 0.0;
  for (auto one = all.begin(); one != all.end() && count < size; ++one) {
    const std::size_t space = devices[one->second].space;
    if (in_space[space]++ >= together(kind, space)) continue;
    taken[one->second] = 1;
    wait = one->first;
    ++count;
  }
  if (count < size) return false;
  reserving = id;
  reserved = std::move(taken);
  reserved_until = wait < kNever ? now + wait : now;  // unknown: nothing ends before it for sure
  return false;
}

}  // namespace paceline::plan
