// SPDX-License-Identifier: Apache-2.0
#include "engine/step/claims.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/step/item_claims.hpp"
#include "engine/step/planned_claims.hpp"

namespace paceline::internal {
namespace {

/// Exactly what a script says.
class ScriptedClaims final : public Claims {
 public:
  explicit ScriptedClaims(StepOptions options) : Claims(options.shares, false) {
    for (std::vector<MicroBatch>& list : options.script) scripts_.push_back({std::move(list)});
  }

 private:
  std::optional<MicroBatch> own(DeviceId device) override {
    if (!has_own(device)) return std::nullopt;
    return scripts_[device].list[scripts_[device].next++];
  }
  std::optional<MicroBatch> take_over(std::size_t, double) override { return std::nullopt; }
  void hand_out(MicroBatch&, double) override {}
  [[nodiscard]] bool has_own(DeviceId device) const override {
    return scripts_[device].next < scripts_[device].list.size();
  }
  [[nodiscard]] bool nothing_left() const override {
    for (std::size_t d = 0; d < scripts_.size(); ++d) {
      if (has_own(d)) return false;
    }
    return true;
  }

  struct Script {  // of one device
    std::vector<MicroBatch> list;
    std::size_t next = 0;
  };
  std::vector<Script> scripts_;
};

}  // namespace

std::unique_ptr<Claims> Claims::of(StepOptions options) {
  if (!options.script.empty()) return std::make_unique<ScriptedClaims>(std::move(options));
  if (options.plan == nullptr || !options.plan->by_cost()) return std::make_unique<PlannedClaims>(std::move(options));
  return std::make_unique<ItemClaims>(options.plan, options.stealing, options.any_size, options.least_items);
}

Claims::Claims(const std::vector<std::int64_t>& shares, bool stealing) {
  for (const std::int64_t share : shares) devices_.push_back({.takes_over = stealing && share > 0});
}

std::optional<MicroBatch> Claims::claim(DeviceId device, double now_seconds) {
  const std::lock_guard lock(mutex_);
  DeviceState& here = devices_[device];
  if (cancelled_ || here.left) return std::nullopt;
  std::optional<MicroBatch> next = own(device);
  if (!next && here.takes_over) next = take_over(device, now_seconds);
  if (!next) {
    here.left = !here.takes_over || !came_early(device);
    return std::nullopt;
  }
  next->device = device;
  hand_out(*next, now_seconds);
  next->last = !has_own(device) && (!here.takes_over || nothing_left());
  return next;
}

bool Claims::asks_again(DeviceId device) {
  const std::lock_guard lock(mutex_);
  runs_dry(device);
  return !cancelled_ && !devices_[device].left;
}

bool Claims::exhausted() {
  const std::lock_guard lock(mutex_);
  return cancelled_ || nothing_left();
}

void Claims::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

}  // namespace paceline::internal
