// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <utility>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/error.hpp>

#include "balance/stage_balancer_state.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::balance {
namespace {

constexpr std::int64_t kLongestTryMemoryAfter = 4096;

/// What a plan needs on a device.
std::int64_t bytes_on(const plan::StagePlan& plan, std::size_t device) {
  const auto at = std::ranges::find(plan.order, device) - plan.order.begin();
  return at < std::ssize(plan.order) ? plan.bytes[static_cast<std::size_t>(at)] : 0;
}

}  // namespace

void StageBalancer::State::limit(const MemoryLimits& to) {
  caps = to.caps;
  options.most_in_flight = to.most_in_flight;
}

bool StageBalancer::State::out_of_memory(std::size_t stage) {
  const plan::StagePlan now = current();
  const std::size_t device = now.order[stage];
  const auto attempt = [&](plan::StageOptions with, const ActiveProblem& problem) {
    try {
      const plan::StagePlan next = search(problem, std::move(with));
      if (bytes_on(next, device) >= now.bytes[stage]) return false;
      plans.clear();
      adopt(next, StageMove::Kind::memory, now.seconds, next.moved_bytes);
      return true;
    } catch (const OutOfMemory&) {
      return false;
    }
  };
  if (proven) {
    limit(*std::exchange(proven, std::nullopt));
    try_after = std::min(2 * try_after, kLongestTryMemoryAfter);
    try_at = step + try_after;
    const ActiveProblem problem = active(batch_size);
    if (attempt(fixed(problem), problem) || attempt(wanted(problem), problem)) return true;
  }
  const MemoryLimits before = limits();
  const auto lowered = [&] {
    if (try_at <= step) try_at = step + try_after;
    return true;
  };
  caps[device] = std::min(caps[device], now.bytes[stage] - 1);  // so much did not fit
  for (std::int64_t most = plan::in_flight(now.schedule, stage) - 1; most >= 1; --most) {
    options.most_in_flight = most;
    const ActiveProblem problem = active(batch_size);
    plan::StageOptions with = fixed(problem);
    with.micro_batches = now.schedule.micro_batches;
    if (attempt(std::move(with), problem)) return lowered();
  }
  // The stage may need more than was planned for it, so one byte less would not do.
  limit(before);
  caps[device] = std::min(caps[device], now.bytes[stage] - now.bytes[stage] / 16 - 1);
  const ActiveProblem problem = active(batch_size);
  if (attempt(wanted(problem), problem)) return lowered();
  limit(before);
  return false;
}

void StageBalancer::State::try_memory_again() {
  if (try_at == 0 || step < try_at) return;
  if (proven) {  // as many steps again, and memory did not run out
    proven.reset();
    try_at = 0;
    try_after = kTryMemoryAfter;
    return;
  }
  proven = limits();
  for (std::size_t id = 0; id < caps.size(); ++id) caps[id] = given.devices[id].memory_bytes;
  options.most_in_flight = most_in_flight;
  try_at = step + try_after;
  next_look = step;
  std::erase_if(plans, [&](const auto& entry) { return entry.first != batch_size; });
}

bool StageBalancer::out_of_memory(std::size_t stage) {
  State& state = *state_;
  if (state.batch_size <= 0 || state.stages_invalid) refuse("out_of_memory without a plan: call plan first");
  const std::size_t stages = state.current().cuts.size();
  if (stage >= stages) refuse("there is no stage {}: the plan has {}", stage, plural(stages, "stage"));
  return state.out_of_memory(stage);
}

}  // namespace paceline::balance
