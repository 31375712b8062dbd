// SPDX-License-Identifier: Apache-2.0
#include "engine/step/item_claims.hpp"

#include <algorithm>
#include <utility>

#include "engine/step/stealing.hpp"

namespace paceline::internal {
namespace {

// A part is not worth a micro-batch of its own if more than this of its time is fixed cost.
constexpr double kMostOverhead = 0.25;

}  // namespace

ItemClaims::ItemClaims(std::shared_ptr<const BatchPlan> plan, bool stealing, bool any_size, std::int64_t least)
    : Claims(plan->shares, stealing),
      plan_(std::move(plan)),
      any_size_(any_size),
      least_(least),
      measured_(!plan_->seconds_per_work.empty()),
      parts_(plan_->shapes.size()) {
  const plan::ItemArrangement& items = plan_->arrangement;
  for (std::size_t d = 0; d < parts_.size(); ++d) {
    parts_[d].next = items.first[d];
    parts_[d].end = items.first[d + 1];
    parts_[d].last_end = items.bounds[parts_[d].end];
  }
}

void ItemClaims::hand_out(MicroBatch& next, double now) {
  next.items = std::span(plan_->arrangement.order)
                   .subspan(static_cast<std::size_t>(next.begin), static_cast<std::size_t>(next.size()));
  parts_[next.device].free_at = now + seconds(next.device, next.begin, next.end);
}

std::int64_t ItemClaims::end_of(const Part& part, std::size_t k) const {
  return k + 1 == part.end ? part.last_end : plan_->arrangement.bounds[k + 1];
}

double ItemClaims::seconds(DeviceId device, std::int64_t begin, std::int64_t end) const {
  return plan_->work(device, begin, end) * (measured_ ? plan_->seconds_per_work[device] : 0.0);
}

std::optional<MicroBatch> ItemClaims::own(DeviceId device) {
  Part& part = parts_[device];
  if (part.empty()) return std::nullopt;
  const std::size_t k = part.next;
  const MicroBatch next{.begin = plan_->arrangement.bounds[k], .end = end_of(part, k)};
  ++part.next;
  return next;
}

double ItemClaims::finish_of(DeviceId device, double now) const {
  const Part& part = parts_[device];
  double finish = free_at(part.free_at, now);
  for (std::size_t k = part.next; k < part.end; ++k) {
    finish += seconds(device, plan_->arrangement.bounds[k], end_of(part, k));
  }
  return finish;
}

std::optional<MicroBatch> ItemClaims::take_over(DeviceId device, double now) {
  const auto victim = find_victim(parts_.size(), device, [&](DeviceId d) -> std::optional<double> {
    const Part& part = parts_[d];
    if (part.empty()) return std::nullopt;
    // Without measurements the device with most items left is the one to help.
    return measured_ ? finish_of(d, now) : static_cast<double>(part.last_end - plan_->arrangement.bounds[part.next]);
  });
  if (!victim) return std::nullopt;
  Part& part = parts_[victim->device];
  const std::int64_t begin = plan_->arrangement.bounds[part.end - 1];
  std::int64_t from = begin;
  while (measured_ && now + seconds(device, from, part.last_end) >= victim->finish) {
    const std::int64_t left = part.last_end - from;
    if (!any_size_ || left < 2 * least_) return std::nullopt;
    from = part.last_end - left / 2;
    const double work = plan_->work(device, from, part.last_end);
    if (plan_->shapes[device].cost.fixed_seconds > kMostOverhead * work) return std::nullopt;
  }
  const MicroBatch taken{.begin = from, .end = part.last_end, .correction = true};
  if (from == begin) {
    --part.end;
    if (!part.empty()) part.last_end = plan_->arrangement.bounds[part.end];
  } else {
    part.last_end = from;
  }
  return taken;
}

bool ItemClaims::nothing_left() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.empty(); });
}

}  // namespace paceline::internal
