// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/stage_planner.hpp"

#include <algorithm>
#include <utility>

#include <paceline/error.hpp>

#include "plural.hpp"

namespace paceline::internal {
namespace {

/// Micro-batches of the steps that measure small and large ones. Several, because the first may be slow (compilation,
/// cold caches) and the median counts.
constexpr std::int64_t kMicroBatches[] = {8, 4};

}  // namespace

bool same_run(const plan::StagePlan& a, const plan::StagePlan& b) {
  return a.cuts == b.cuts && a.order == b.order && a.sizes == b.sizes && a.schedule == b.schedule;
}

StagePlanner::StagePlanner(plan::StageProblem problem, plan::StageOptions options, balance::MoveCost moves,
                           bool measure)
    : problem_(std::move(problem)),
      options_(std::move(options)),
      moves_(moves),
      retired_(problem_.devices.size(), false) {
  if (measure) {
    const std::size_t turns = options_.order.empty() ? problem_.devices.size() : 1;
    steps_ = turns * (options_.micro_batches ? 1 : std::size(kMicroBatches));
  }
  renew(options_);
}

void StagePlanner::renew(plan::StageOptions options) {
  balancer_ = std::make_unique<balance::StageBalancer>(problem_, std::move(options), moves_);
  for (std::size_t d = 0; d < retired_.size(); ++d) {
    if (retired_[d]) balancer_->retire(d);
  }
}

plan::StageOptions StagePlanner::measuring_options(std::int64_t batch_size, bool in_turn) const {
  plan::StageOptions options = options_;
  const std::size_t turns = steps_ / (options_.micro_batches ? 1 : std::size(kMicroBatches));
  if (!options.micro_batches) options.micro_batches = std::min(batch_size, kMicroBatches[run_ / turns]);
  if (!in_turn || !options.order.empty()) return options;
  for (std::size_t d = 0; d < retired_.size(); ++d) {
    if (!retired_[d]) options.order.push_back(d);
  }
  const std::size_t begin = run_ % options.order.size();
  std::rotate(options.order.begin(), options.order.begin() + static_cast<std::ptrdiff_t>(begin), options.order.end());
  options.order.resize(
      std::min(options.order.size(), options.cuts.empty() ? problem_.blocks.size() : options.cuts.size()));
  return options;
}

std::shared_ptr<const plan::StagePlan> StagePlanner::plan(std::int64_t batch_size) {
  const auto planned = [&] { return std::make_shared<const plan::StagePlan>(balancer_->plan(batch_size)); };
  if (!measures()) return last_ = planned();
  if (ready_ == run_) return last_ = planned();
  renew(measuring_options(batch_size, true));
  try {
    last_ = planned();
  } catch (const OutOfMemory&) {  // in this order it does not fit the devices
    renew(measuring_options(batch_size, false));
    last_ = planned();
  }
  ready_ = run_;
  return last_;
}

void StagePlanner::record(const std::vector<BlockSample>& samples) {
  samples_.insert(samples_.end(), samples.begin(), samples.end());
  if (++recorded_ < steps_) return;
  const BlockFit fit = fit_costs(samples_, problem_.devices.size(), problem_.blocks);
  for (std::size_t d = 0; d < problem_.devices.size(); ++d) problem_.devices[d].speed = fit.speeds[d];
  renew(options_);
}

void StagePlanner::record(const plan::StagePlan& plan, std::span<const balance::StageTimings> timings) {
  if (last_ == nullptr || steps_ > recorded_ || !same_run(plan, *last_)) return;
  balancer_->record(timings);
}

bool StagePlanner::out_of_memory(std::size_t stage) { return balancer_->out_of_memory(stage); }

void StagePlanner::retire(DeviceId device) {
  balancer_->retire(device);
  retired_[device] = true;
}

void StagePlanner::restore(DeviceId device) {
  balancer_->restore(device);
  retired_[device] = false;
}

std::string StagePlanner::explain() const {
  if (recorded_ == steps_) return balancer_->explain();
  return "The blocks are being measured: " + plural(steps_ - run_, "step") + " to go.";
}

}  // namespace paceline::internal
