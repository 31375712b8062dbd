// SPDX-License-Identifier: Apache-2.0
#include "engine/step/planned_claims.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include <paceline/plan/corrections.hpp>
#include <paceline/plan/hold_back.hpp>

#include "engine/step/stealing.hpp"

namespace paceline::internal {
namespace {

std::int64_t round_up(std::int64_t items, std::int64_t granularity) {
  return (items + granularity - 1) / granularity * granularity;
}

}  // namespace

PlannedClaims::PlannedClaims(StepOptions options)
    : Claims(options.shares, options.stealing), options_(std::move(options)), parts_(options_.shares.size()) {
  grain_ = round_up(options_.least_items, options_.granularity);
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

std::optional<MicroBatch> PlannedClaims::own(DeviceId device) {
  if (!has_own(device)) return std::nullopt;
  Part& part = parts_[device];
  const std::int64_t begin = part.begin;
  part.begin += own_piece(device);
  return MicroBatch{.begin = begin, .end = part.begin};
}

std::optional<MicroBatch> PlannedClaims::take_over(DeviceId device, double now) {
  return pool_begin_ < pool_end_ ? take_correction(device, now) : steal(device, now);
}

bool PlannedClaims::came_early(DeviceId device) const {
  return !parts_[device].held.empty() && options_.micro_batch == 0 && pool_begin_ < pool_end_;
}

std::int64_t PlannedClaims::run_ahead(DeviceId device) const {
  return options_.run_ahead.empty() ? 0 : options_.run_ahead[device];
}

std::int64_t PlannedClaims::own_piece(DeviceId device) const {
  const std::int64_t left = parts_[device].end - parts_[device].begin;
  if (options_.micro_batch > 0) return plan::fitting_piece(options_.micro_batch, left, options_.least_items);
  if (pool_begin_ == pool_end_) return left;
  const std::int64_t later = std::min(run_ahead(device), left / floor_ - 1);  // pieces that are left for the end
  return left - std::max<std::int64_t>(later, 0) * floor_;
}

void PlannedClaims::hand_out(MicroBatch& next, double now) {
  if (options_.models.empty()) return;
  const DeviceId device = next.device;
  Part& part = parts_[device];
  const double seconds = options_.models[device].seconds(next.size());
  part.free_at = now + held_seconds(device) + seconds;
  part.held.push_back(seconds);
  if (std::ssize(part.held) > run_ahead(device)) part.held.erase(part.held.begin());
}

double PlannedClaims::held_seconds(DeviceId device) const {
  const std::vector<double>& held = parts_[device].held;
  return std::accumulate(held.begin(), held.end(), 0.0);
}

std::optional<MicroBatch> PlannedClaims::take_correction(DeviceId device, double now) {
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
  const std::int64_t size = std::min(wanted, left);
  const MicroBatch next{.begin = pool_begin_, .end = pool_begin_ + size, .correction = true};
  pool_begin_ += size;
  return next;
}

double PlannedClaims::own_seconds(DeviceId device) const {
  const Part& part = parts_[device];
  const std::int64_t items = part.end - part.begin;
  if (items == 0 || options_.models.empty()) return 0.0;
  const plan::CostModel& model = options_.models[device];
  if (options_.micro_batch == 0) return model.seconds(items);
  const std::int64_t full = items / options_.micro_batch;
  const std::int64_t rest = items % options_.micro_batch;
  return static_cast<double>(full) * model.seconds(options_.micro_batch) + (rest > 0 ? model.seconds(rest) : 0.0);
}

double PlannedClaims::finish_of(DeviceId device, double now) const {
  return free_at(parts_[device].free_at, now) + own_seconds(device);
}

std::optional<MicroBatch> PlannedClaims::steal(DeviceId device, double now) {
  const auto victim = find_victim(parts_.size(), device, [&](DeviceId d) -> std::optional<double> {
    const std::int64_t waiting = parts_[d].end - parts_[d].begin;
    if (waiting == 0) return std::nullopt;
    // Without models the device with most items left is the one to help.
    return options_.models.empty() ? static_cast<double>(waiting) : finish_of(d, now);
  });
  if (!victim) return std::nullopt;
  Part& part = parts_[victim->device];
  const std::int64_t left = part.end - part.begin;
  std::int64_t size = 0;
  if (options_.micro_batch > 0) {
    // The last micro-batch of a part may be short; stealing takes that one first, so sizes stay the planned ones.
    const std::int64_t rest = left % options_.micro_batch;
    size = rest > 0 ? rest : options_.micro_batch;
  } else {
    size = std::max(floor_, round_up(left / 2, grain_));
  }
  size = plan::fitting_piece(size, left, options_.least_items);
  if (!options_.models.empty() &&
      now + held_seconds(device) + options_.models[device].seconds(size) >= victim->finish) {
    return std::nullopt;
  }
  part.end -= size;
  return MicroBatch{.begin = part.end, .end = part.end + size, .correction = true};
}

bool PlannedClaims::nothing_left() const {
  return pool_begin_ == pool_end_ &&
         std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.begin == part.end; });
}

}  // namespace paceline::internal
