// SPDX-License-Identifier: Apache-2.0
#include "engine/step/claims.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/step/item_claims.hpp"
#include "engine/step/planned_claims.hpp"

namespace paceline::engine {
namespace {

/// Exactly what a script says.
class ScriptedClaims final : public Claims {
 public:
  explicit ScriptedClaims(StepOptions options)
      : Claims(options.shares, false), script_(std::move(options.script)), handed_out_(script_.size(), 0) {}

 private:
  std::optional<MicroBatch> own(std::size_t device) override {
    if (!has_own(device)) return std::nullopt;
    return script_[device][handed_out_[device]++];
  }
  std::optional<MicroBatch> take_over(std::size_t, double) override { return std::nullopt; }
  void hand_out(MicroBatch&, double) override {}
  [[nodiscard]] bool has_own(std::size_t device) const override { return handed_out_[device] < script_[device].size(); }
  [[nodiscard]] bool nothing_left() const override {
    for (std::size_t d = 0; d < script_.size(); ++d) {
      if (has_own(d)) return false;
    }
    return true;
  }

  std::vector<std::vector<MicroBatch>> script_;
  std::vector<std::size_t> handed_out_;
};

}  // namespace

std::unique_ptr<Claims> Claims::of(StepOptions options) {
  if (!options.script.empty()) return std::make_unique<ScriptedClaims>(std::move(options));
  if (options.plan == nullptr || !options.plan->by_cost()) return std::make_unique<PlannedClaims>(std::move(options));
  return std::make_unique<ItemClaims>(options.plan, options.stealing, options.any_size, options.least_items);
}

Claims::Claims(const std::vector<std::int64_t>& shares, bool stealing) : left_(shares.size(), false) {
  std::transform(shares.begin(), shares.end(), std::back_inserter(takes_over_),
                 [stealing](std::int64_t share) { return stealing && share > 0; });
}

std::optional<MicroBatch> Claims::claim(std::size_t device, double now_seconds) {
  const std::lock_guard lock(mutex_);
  if (cancelled_ || left_[device]) return std::nullopt;
  std::optional<MicroBatch> next = own(device);
  if (!next && takes_over_[device]) next = take_over(device, now_seconds);
  if (!next) {
    left_[device] = !takes_over_[device] || !came_early(device);
    return std::nullopt;
  }
  next->device_index = device;
  hand_out(*next, now_seconds);
  next->last = !has_own(device) && (!takes_over_[device] || nothing_left());
  return next;
}

bool Claims::asks_again(std::size_t device) {
  const std::lock_guard lock(mutex_);
  runs_dry(device);
  return !cancelled_ && !left_[device];
}

bool Claims::exhausted() {
  const std::lock_guard lock(mutex_);
  return cancelled_ || nothing_left();
}

void Claims::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

}  // namespace paceline::engine
