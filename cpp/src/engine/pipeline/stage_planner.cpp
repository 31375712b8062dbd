// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/stage_planner.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.hpp>

#include "engine/pipeline/block_costs.hpp"
#include "plural.hpp"

namespace paceline {
namespace {

/// Micro-batches of a step that measures. Several, because the first may be slow (compilation, cold caches) and the
/// median counts.
constexpr std::int64_t kMicroBatches = 8;
constexpr std::ptrdiff_t kMostRecent = 16;  // moves, as a StageBalancer has

bool same_run(const plan::StagePlan& a, const plan::StagePlan& b) {
  return a.cuts == b.cuts && a.order == b.order && a.sizes == b.sizes && a.schedule == b.schedule;
}

}  // namespace

StagePlanner::StagePlanner(plan::StageProblem problem, plan::StageOptions options, balance::MoveCost moves,
                           bool measure)
    : problem_(std::move(problem)),
      options_(std::move(options)),
      moves_(moves),
      retired_(problem_.devices.size(), false),
      micro_batches_(kMicroBatches) {
  balancer_ = made(options_);
  if (measure) measure_again();
}

std::unique_ptr<balance::StageBalancer> StagePlanner::made(plan::StageOptions options) const {
  auto balancer = std::make_unique<balance::StageBalancer>(problem_, std::move(options), moves_);
  balancer->set_least_items(least_items_);
  for (std::size_t d = 0; d < retired_.size(); ++d) {
    if (retired_[d]) balancer->retire(d);
  }
  return balancer;
}

void StagePlanner::measure_again() {
  keep_moves();
  const auto live = static_cast<std::size_t>(std::ranges::count(retired_, false));
  const std::size_t stages = std::min(live, options_.cuts.empty() ? problem_.blocks.size() : options_.cuts.size());
  const std::size_t turns = !options_.order.empty() || live == 1 ? 1 : std::max<std::size_t>(2, live - stages + 1);
  steps_ = turns + (options_.micro_batches ? 0 : 1);
  run_ = recorded_ = 0;
  samples_.clear();
  ready_.reset();
}

plan::StageOptions StagePlanner::measuring_options(std::int64_t batch_size, bool in_turn) const {
  plan::StageOptions options = options_;
  const bool other_size = !options.micro_batches && run_ + 1 == steps_;
  if (!options.micro_batches) {
    const std::int64_t most = std::max<std::int64_t>(1, batch_size / least_items_);
    const std::int64_t count = std::min(micro_batches_, most);
    const std::int64_t smaller = std::min(2 * count, most);
    const bool larger = smaller < 2 * count && !short_of_memory_;
    options.micro_batches = !other_size ? count : larger ? std::max<std::int64_t>(1, count / 2) : smaller;
  }
  if (!in_turn || !options.order.empty()) return options;
  for (std::size_t d = 0; d < retired_.size(); ++d) {
    if (!retired_[d]) options.order.push_back(d);
  }
  const std::size_t begin = other_size ? 0 : run_ % options.order.size();
  std::rotate(options.order.begin(), options.order.begin() + static_cast<std::ptrdiff_t>(begin), options.order.end());
  options.order.resize(
      std::min(options.order.size(), options.cuts.empty() ? problem_.blocks.size() : options.cuts.size()));
  return options;
}

std::shared_ptr<const plan::StagePlan> StagePlanner::plan(std::int64_t batch_size) {
  if (!measures() && one_size_ && batch_size / least_items_ >= 2 * micro_batches_) measure_again();
  const auto planned = [&] { return std::make_shared<const plan::StagePlan>(balancer_->plan(batch_size)); };
  if (!measures() || ready_ == std::pair(run_, batch_size)) return last_ = planned();
  for (bool in_turn = true;;) {
    balancer_ = made(measuring_options(batch_size, in_turn));
    try {
      last_ = planned();
      break;
    } catch (const OutOfMemory&) {
      if (!in_turn) {  // nor does it in any order
        if (options_.micro_batches || micro_batches_ >= batch_size / least_items_) throw;
        micro_batches_ *= 2;
        short_of_memory_ = true;
      }
      in_turn = !in_turn;  // in this order it does not fit the devices
    }
  }
  ready_ = {run_, batch_size};
  return last_;
}

std::shared_ptr<const plan::StagePlan> StagePlanner::predict(std::int64_t items, std::int64_t least_items) {
  auto out = std::make_shared<plan::StagePlan>();
  std::int64_t count = options_.micro_batches.value_or(kMicroBatches);
  std::int64_t largest = items;
  if (last_ != nullptr && std::ranges::none_of(last_->order, [&](std::size_t d) { return retired_[d]; })) {
    out->cuts = last_->cuts;
    out->order = last_->order;
    count = std::ssize(last_->sizes);
    largest = last_->sizes.front();
  } else {
    plan::StageOptions options = options_;
    options.micro_batches = std::ssize(retired_);
    const plan::StagePlan first = made(options)->plan(*options.micro_batches);
    out->cuts = first.cuts;
    out->order = first.order;
  }
  largest = std::max(least_items, std::min(largest, most_predicted_.value_or(largest)));
  count = std::min(std::max(count, (items + largest - 1) / largest), std::max<std::int64_t>(1, items / least_items));
  for (std::int64_t m = 0; m < count; ++m) out->sizes.push_back(items / count + (m < items % count ? 1 : 0));
  out->schedule = plan::forward_only(out->cuts.size(), count);
  return out;
}

void StagePlanner::record(std::vector<BlockSample> samples, std::span<const std::size_t> classes) {
  if (recorded_ == steps_) return;
  std::ranges::stable_sort(samples, {}, &BlockSample::items);
  const std::int64_t middle = samples.empty() ? 0 : samples[samples.size() / 2].items;
  std::ranges::copy_if(samples, std::back_inserter(samples_),
                       [&](const BlockSample& one) { return one.items == middle; });
  ++steps_recorded_;
  if (++recorded_ < steps_) return;
  const std::vector<double> speeds =
      internal::fit_costs(samples_, problem_.devices.size(), problem_.blocks, classes).speeds;
  const bool one_size =
      std::ranges::all_of(samples_, [&](const BlockSample& one) { return one.items == samples_.front().items; });
  know(problem_.blocks, speeds);
  one_size_ = one_size && !options_.micro_batches;
}

void StagePlanner::know(std::vector<plan::BlockCost> blocks, std::span<const double> speeds) {
  if (blocks.size() != problem_.blocks.size() || speeds.size() != problem_.devices.size()) {
    throw InvalidArgument(fmt::format("there are costs of {} and speeds of {}, for {} and {}",
                                      plural(blocks.size(), "block"), plural(speeds.size(), "device"),
                                      problem_.blocks.size(), problem_.devices.size()));
  }
  if (steps_ == 0) keep_moves();  // while blocks are measured, changes are no moves
  problem_.blocks = std::move(blocks);
  for (std::size_t d = 0; d < speeds.size(); ++d) problem_.devices[d].speed = speeds[d];
  balancer_ = made(options_);
  steps_ = run_ = recorded_ = 0;
  steps_before_ = steps_recorded_;
  one_size_ = false;
}

void StagePlanner::set_bytes(const std::vector<plan::BlockCost>& blocks) {
  if (blocks.size() != problem_.blocks.size()) {
    throw InvalidArgument(
        fmt::format("there are bytes of {} for {}", plural(blocks.size(), "block"), problem_.blocks.size()));
  }
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    plan::BlockCost& own = problem_.blocks[b];
    plan::BlockCost next = blocks[b];
    next.forward_fixed = own.forward_fixed;
    next.forward_per_item = own.forward_per_item;
    next.backward_fixed = own.backward_fixed;
    next.backward_per_item = own.backward_per_item;
    own = next;
  }
}

void StagePlanner::record(const plan::StagePlan& plan, std::span<const balance::MeasuredStage> timings) {
  if (last_ == nullptr || steps_ > recorded_ || !same_run(plan, *last_)) return;
  balancer_->record(timings);
  ++steps_recorded_;
}

void StagePlanner::set_least_items(std::int64_t items) {
  balancer_->set_least_items(items);
  least_items_ = items;
}

bool StagePlanner::out_of_memory(std::size_t stage) {
  if (measures() && last_ != nullptr && !options_.micro_batches) {
    std::int64_t items = 0;
    for (const std::int64_t size : last_->sizes) items += size;
    const std::int64_t count = std::ssize(last_->sizes);
    if (count < items / least_items_) {
      micro_batches_ = 2 * count;
      short_of_memory_ = true;
      ready_.reset();
      return true;
    }
  }
  return balancer_->out_of_memory(stage);
}

bool StagePlanner::out_of_memory_predicting(std::int64_t items) noexcept {
  if (items <= 1) return false;
  most_predicted_ = items / 2;
  return true;
}

void StagePlanner::retire(std::size_t device) {
  balancer_->retire(device);
  retired_[device] = true;
}

void StagePlanner::restore(std::size_t device) {
  balancer_->restore(device);
  retired_[device] = false;
}

void StagePlanner::keep_moves() {
  recent_before_ = recent_moves();
  moves_before_ = move_count();
}

std::int64_t StagePlanner::move_count() const noexcept {
  return moves_before_ + (recorded_ < steps_ ? 0 : balancer_->move_count());
}

std::vector<balance::StageMove> StagePlanner::recent_moves() const {
  std::vector<balance::StageMove> moves = recent_before_;
  if (recorded_ < steps_) return moves;
  for (balance::StageMove move : balancer_->recent_moves()) {
    move.step += steps_before_;
    moves.push_back(std::move(move));
  }
  if (std::ssize(moves) > kMostRecent) moves.erase(moves.begin(), moves.end() - kMostRecent);
  return moves;
}

std::string StagePlanner::explain() const {
  if (recorded_ == steps_) return balancer_->explain(steps_before_);
  return "The blocks are being measured: " + plural(steps_ - run_, "step") + " to go.\n";
}

}  // namespace paceline
