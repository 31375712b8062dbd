// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/step.hpp>

#include "engine/step/claims.hpp"

namespace paceline::internal {

/// Claims of a step whose items have costs. Each device runs its packed micro-batches, longest items first. Then it
/// takes over work from the back of another device's list that this device would finish later.
///
/// It takes over a whole micro-batch, or its shorter half, or half of that, if it would not finish the whole in time.
/// The items at the back are the cheapest ones, so the devices' finishes are evened out in small steps. If `any_size`
/// is false, only whole micro-batches change hands, because devices that compile or choose algorithms by size would
/// meet new sizes. No part has fewer than `least` items.
class ItemClaims final : public Claims {
 public:
  ItemClaims(std::shared_ptr<const BatchPlan> plan, bool stealing, bool any_size, std::int64_t least = 1);

 private:
  /// Items planned for a device that are not handed out yet.
  struct Part {
    std::size_t next = 0;  // micro-batches not handed out: [next, end) of `bounds`
    std::size_t end = 0;
    std::int64_t last_end = 0;  // the end of the last one, of which a part may be taken over already
    double free_at = 0.0;
    [[nodiscard]] bool empty() const { return next == end; }
  };

  std::optional<MicroBatch> own(DeviceId device) override;
  std::optional<MicroBatch> take_over(DeviceId device, double now) override;
  void hand_out(MicroBatch& next, double now) override;
  [[nodiscard]] bool has_own(DeviceId device) const override { return !parts_[device].empty(); }
  [[nodiscard]] bool nothing_left() const override;

  [[nodiscard]] std::int64_t end_of(const Part& part, std::size_t k) const;
  [[nodiscard]] double seconds(DeviceId device, std::int64_t begin, std::int64_t end) const;
  /// When a device will have run what is planned for it.
  [[nodiscard]] double finish_of(DeviceId device, double now) const;

  std::shared_ptr<const BatchPlan> plan_;
  bool any_size_;
  std::int64_t least_;
  bool measured_;
  std::vector<Part> parts_;
};

}  // namespace paceline::internal
