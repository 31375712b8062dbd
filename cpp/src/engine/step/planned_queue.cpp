// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <utility>

#include <paceline/plan/corrections.hpp>
#include <paceline/plan/hold_back.hpp>

#include "engine/step/work_queue.hpp"
#include "plan/numbers.hpp"

namespace paceline::internal {
namespace {

class PlannedQueue final : public WorkQueue {
 public:
  explicit PlannedQueue(StepOptions options)
      : WorkQueue(options.shares, options.stealing), options_(std::move(options)), parts_(options_.shares.size()) {
    grain_ = plan::rounded_up(options_.least_items, options_.granularity);
    plan::HoldBackPlan held_back{.first_chunks = options_.shares};
    if (options_.stealing && options_.micro_batch == 0) {
      held_back = plan::plan_hold_back(options_.shares, options_.models, options_.noise, grain_);
    }
    floor_ = held_back.floor;
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      parts_[d].begin = offset;
      parts_[d].end = offset += held_back.first_chunks[d];
    }
    pool_begin_ = offset;
    pool_end_ = offset + held_back.pool;
  }

 private:
  /// Items planned for a device that are not handed out yet.
  struct Part {
    std::int64_t begin = 0;  // own items not handed out: [begin, end)
    std::int64_t end = 0;
    double free_at = 0.0;        // predicted end of everything it holds
    std::vector<double> held{};  // predicted seconds of the micro-batches that it will still hold at its next claim
    [[nodiscard]] std::int64_t left() const { return end - begin; }
  };

  [[nodiscard]] bool has_own(std::size_t device) const override { return parts_[device].left() > 0; }
  [[nodiscard]] bool any_common() const override { return pool_begin_ < pool_end_; }
  void runs_dry(std::size_t device) override { parts_[device].held.clear(); }
  [[nodiscard]] bool came_early(std::size_t device) const override {
    return !parts_[device].held.empty() && options_.micro_batch == 0 && any_common();
  }

  MicroBatch own(std::size_t device) override {
    Part& part = parts_[device];
    const std::int64_t begin = part.begin;
    part.begin += own_piece(device);
    return {.begin = begin, .end = part.begin};
  }

  std::optional<MicroBatch> take_over(std::size_t device, double now) override {
    return any_common() ? take_correction(device, now) : steal(device, now);
  }

  void hand_out(std::size_t device, MicroBatch& next, double now) override {
    if (options_.models.empty()) return;
    Part& part = parts_[device];
    const double seconds = options_.models[device].seconds(next.size());
    part.free_at = now + held_seconds(device) + seconds;
    part.held.push_back(seconds);
    if (std::ssize(part.held) > run_ahead(device)) part.held.erase(part.held.begin());
  }

  [[nodiscard]] double finish_of(std::size_t device, double now) const override {
    const std::int64_t items = parts_[device].left();
    if (options_.models.empty()) return static_cast<double>(items);
    const plan::CostModel& model = options_.models[device];
    const double free = free_at(parts_[device].free_at, now);
    if (items == 0) return free;
    if (options_.micro_batch == 0) return free + model.seconds(items);
    const std::int64_t rest = items % options_.micro_batch;
    return free + (static_cast<double>(items / options_.micro_batch) * model.seconds(options_.micro_batch) +
                   (rest > 0 ? model.seconds(rest) : 0.0));
  }

  [[nodiscard]] std::int64_t run_ahead(std::size_t device) const {
    return options_.run_ahead.empty() ? 0 : options_.run_ahead[device];
  }

  [[nodiscard]] double held_seconds(std::size_t device) const {
    const std::vector<double>& held = parts_[device].held;
    return std::accumulate(held.begin(), held.end(), 0.0);
  }

  [[nodiscard]] std::int64_t own_piece(std::size_t device) const {
    const std::int64_t left = parts_[device].left();
    if (options_.micro_batch > 0) return plan::fitting_piece(options_.micro_batch, left, options_.least_items);
    if (!any_common()) return left;
    const std::int64_t later = std::min(run_ahead(device), left / floor_ - 1);  // pieces that are left for the end
    return left - std::max<std::int64_t>(later, 0) * floor_;
  }

  std::optional<MicroBatch> take_correction(std::size_t device, double now) {
    std::vector<plan::TailDevice> devices(parts_.size());
    bool alone = true;  // no other device will take from the rest
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      // A device that still has to run its own chunk comes to the pool only after it.
      devices[d] = {.model = options_.models[d],
                    .free_at_seconds = d == device ? now + held_seconds(d) : finish_of(d, now),
                    .may_claim = may_come(d)};
      alone = alone && (d == device || !devices[d].may_claim);
    }
    const std::int64_t left = pool_end_ - pool_begin_;
    std::int64_t wanted = plan::next_correction(left, devices, static_cast<std::int64_t>(device), floor_, grain_);
    if (alone) wanted = std::max(wanted, std::min(floor_, left));
    if (wanted <= 0) return std::nullopt;
    const std::int64_t begin = pool_begin_;
    pool_begin_ += std::min(wanted, left);
    return MicroBatch{.begin = begin, .end = pool_begin_, .correction = true};
  }

  std::optional<MicroBatch> steal(std::size_t device, double now) {
    const std::optional<Victim> victim = find_victim(device, now);
    if (!victim) return std::nullopt;
    Part& part = parts_[victim->device];
    const std::int64_t left = part.left();
    std::int64_t size = 0;
    if (options_.micro_batch > 0) {
      // The last micro-batch of a part may be short; stealing takes that one first, so sizes stay the planned ones.
      const std::int64_t rest = left % options_.micro_batch;
      size = rest > 0 ? rest : options_.micro_batch;
    } else {
      size = std::max(floor_, plan::rounded_up(left / 2, grain_));
    }
    size = plan::fitting_piece(size, left, options_.least_items);
    if (!options_.models.empty() &&
        now + held_seconds(device) + options_.models[device].seconds(size) >= victim->finish) {
      return std::nullopt;
    }
    part.end -= size;
    return MicroBatch{.begin = part.end, .end = part.end + size, .correction = true};
  }

  StepOptions options_;
  std::vector<Part> parts_;
  std::int64_t pool_begin_ = 0;
  std::int64_t pool_end_ = 0;
  std::int64_t grain_ = 1;  // of corrections and steals: the granularity, but not less than the least items
  std::int64_t floor_ = 1;
};

}  // namespace

std::unique_ptr<WorkQueue> planned_queue(StepOptions options) {
  return std::make_unique<PlannedQueue>(std::move(options));
}

}  // namespace paceline::internal
