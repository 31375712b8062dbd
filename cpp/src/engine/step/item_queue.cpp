// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "engine/step/work_queue.hpp"

namespace paceline::internal {
namespace {

// A part is not worth a micro-batch of its own if more than this of its time is fixed cost.
constexpr double kMostFixedPart = 0.25;

class ItemQueue final : public WorkQueue {
 public:
  ItemQueue(std::shared_ptr<const BatchPlan> plan, bool stealing, bool any_size, std::int64_t least)
      : WorkQueue(plan->shares, stealing),
        plan_(std::move(plan)),
        any_size_(any_size),
        least_(least),
        measured_(!plan_->seconds_per_work.empty()),
        parts_(plan_->shapes.size()) {
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      parts_[d].next = plan_->arrangement.first[d];
      parts_[d].end = plan_->arrangement.first[d + 1];
      parts_[d].last_end = bound(parts_[d].end);
    }
  }

 private:
  /// Items planned for a device that are not handed out yet.
  struct Part {
    std::size_t next = 0;  // micro-batches not handed out: [next, end) of the plan's bounds
    std::size_t end = 0;
    std::int64_t last_end = 0;  // the end of the last one, of which a part may be taken over already
    double free_at = 0.0;
  };

  [[nodiscard]] bool has_own(std::size_t device) const override { return parts_[device].next < parts_[device].end; }

  MicroBatch own(std::size_t device) override {
    Part& part = parts_[device];
    const std::size_t k = part.next++;
    return {.begin = bound(k), .end = end_of(part, k)};
  }

  void hand_out(std::size_t device, MicroBatch& next, double now) override {
    next.items = plan_->items(next.begin, next.end);
    parts_[device].free_at = now + seconds(device, next.begin, next.end);
  }

  [[nodiscard]] double finish_of(std::size_t device, double now) const override {
    const Part& part = parts_[device];
    if (!measured_) return static_cast<double>(part.last_end - bound(part.next));
    double finish = free_at(part.free_at, now);
    for (std::size_t k = part.next; k < part.end; ++k) finish += seconds(device, bound(k), end_of(part, k));
    return finish;
  }

  std::optional<MicroBatch> take_over(std::size_t device, double now) override {
    const std::optional<Victim> victim = find_victim(device, now);
    if (!victim) return std::nullopt;
    Part& part = parts_[victim->device];
    const std::int64_t begin = bound(part.end - 1);
    std::int64_t from = begin;
    while (measured_ && now + seconds(device, from, part.last_end) >= victim->finish) {
      const std::int64_t left = part.last_end - from;
      if (!any_size_ || left / 2 < least_) return std::nullopt;
      from = part.last_end - left / 2;
      const double work = plan_->work(device, from, part.last_end);
      if (plan_->shapes[device].cost.fixed_seconds > kMostFixedPart * work) return std::nullopt;
    }
    const MicroBatch taken{.begin = from, .end = part.last_end, .correction = true};
    part.last_end = from;
    if (from == begin) --part.end;
    return taken;
  }

  [[nodiscard]] std::int64_t bound(std::size_t k) const { return plan_->arrangement.bounds[k]; }
  [[nodiscard]] std::int64_t end_of(const Part& part, std::size_t k) const {
    return k + 1 == part.end ? part.last_end : bound(k + 1);
  }
  [[nodiscard]] double seconds(std::size_t device, std::int64_t begin, std::int64_t end) const {
    return plan_->work(device, begin, end) * (measured_ ? plan_->seconds_per_work[device] : 0.0);
  }

  std::shared_ptr<const BatchPlan> plan_;
  bool any_size_;
  std::int64_t least_;
  bool measured_;
  std::vector<Part> parts_;
};

}  // namespace

std::unique_ptr<WorkQueue> item_queue(std::shared_ptr<const BatchPlan> plan, bool stealing, bool any_size,
                                      std::int64_t least) {
  return std::make_unique<ItemQueue>(std::move(plan), stealing, any_size, least);
}

}  // namespace paceline::internal
