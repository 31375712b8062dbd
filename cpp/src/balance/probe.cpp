// SPDX-License-Identifier: Apache-2.0
#include "balance/probe.hpp"

#include <algorithm>

namespace paceline::balance {
namespace {

constexpr std::int64_t kFirstWait = 100;
constexpr std::int64_t kLongestWait = 1600;

}  // namespace

std::optional<std::vector<std::int64_t>> Probe::shares(const PolicyContext& context,
                                                       const std::vector<std::int64_t>& present) {
  std::vector<std::int64_t> shares = present;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] > 0 || context.limits[i].maximum == 0) {
      idle_.erase(i);
      continue;
    }
    const Idle& idle = idle_.try_emplace(i, Idle{context.step + kFirstWait, kFirstWait}).first->second;
    if (context.step < idle.due_step) continue;
    const std::int64_t grain = context.options.granularity;
    const std::int64_t wanted = (std::max(context.limits[i].minimum, grain) + grain - 1) / grain * grain;
    const auto giver = std::max_element(shares.begin(), shares.end());
    const plan::ShareLimits& limits = context.limits[static_cast<std::size_t>(giver - shares.begin())];
    if (wanted > context.limits[i].maximum || *giver - wanted < std::max(limits.minimum, grain)) continue;
    *giver -= wanted;
    shares[i] = wanted;
  }
  if (shares == present) return std::nullopt;
  return shares;
}

void Probe::observe(const PolicyContext& context, const StepTimings& timings) {
  for (auto& [device, idle] : idle_) {
    if (context.step < idle.due_step || timings.devices[device].empty()) continue;
    if (context.estimator.doubtful(device)) continue;  // once more, at once
    idle.wait = std::min(2 * idle.wait, kLongestWait);
    idle.due_step = context.step + idle.wait;
  }
}

}  // namespace paceline::balance
