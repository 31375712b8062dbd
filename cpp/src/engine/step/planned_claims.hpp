// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>

#include "engine/step/claims.hpp"

namespace paceline::internal {

/// Claims of a step whose items all cost the same.
///
/// The batch is divided as [device 0's chunk][device 1's chunk]...[pool]. A device first takes its own chunk, whole or
/// in micro-batches of the fixed size. Then it takes corrections from the pool, sized so that all devices finish
/// together (plan::next_correction). Then it steals from the back of another device's chunk what that device would
/// finish later. A device that holds micro-batches ahead gets the end of its chunk in pieces of the smallest
/// correction, so that it claims again when the last of these pieces begins.
class PlannedClaims final : public Claims {
 public:
  explicit PlannedClaims(StepOptions options);

 private:
  /// Items planned for a device that are not handed out yet.
  struct Part {
    std::int64_t begin = 0;  // own items not handed out: [begin, end)
    std::int64_t end = 0;
    double free_at = 0.0;        // predicted end of everything it holds
    std::vector<double> held{};  // predicted seconds of the micro-batches that it will still hold at its next claim
  };

  std::optional<MicroBatch> own(DeviceId device) override;
  std::optional<MicroBatch> take_over(DeviceId device, double now) override;
  void hand_out(MicroBatch& next, double now) override;
  [[nodiscard]] bool has_own(DeviceId device) const override { return parts_[device].begin < parts_[device].end; }
  [[nodiscard]] bool nothing_left() const override;
  [[nodiscard]] bool came_early(DeviceId device) const override;
  void runs_dry(DeviceId device) override { parts_[device].held.clear(); }

  std::optional<MicroBatch> take_correction(DeviceId device, double now);
  std::optional<MicroBatch> steal(DeviceId device, double now);
  /// When a device will have run what is planned for it.
  [[nodiscard]] double finish_of(DeviceId device, double now) const;
  [[nodiscard]] double own_seconds(DeviceId device) const;
  [[nodiscard]] double held_seconds(DeviceId device) const;
  [[nodiscard]] std::int64_t run_ahead(DeviceId device) const;
  [[nodiscard]] std::int64_t own_piece(DeviceId device) const;

  StepOptions options_;
  std::vector<Part> parts_;
  std::int64_t pool_begin_ = 0;
  std::int64_t pool_end_ = 0;
  std::int64_t grain_ = 1;  // of corrections and steals: the granularity, but not less than the least items
  std::int64_t floor_ = 1;
};

}  // namespace paceline::internal
