// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>

#include "engine/step/claims.hpp"

namespace paceline::engine {

/// Claims of a step whose items all cost the same.
///
/// The batch is divided as [device 0's chunk][device 1's chunk]...[pool]. A device first takes its own chunk, whole or
/// in micro-batches of the fixed size. Then it takes corrections from the pool, sized so that all devices finish
/// together (plan::next_correction). Then it steals from the back of another device's chunk what that device would
/// finish later. A device that holds micro-batches ahead gets the end of its chunk in pieces of the smallest
/// correction, so that it claims again when the last of these pieces begins.
class PACELINE_API PlannedClaims final : public Claims {
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

  std::optional<MicroBatch> own(std::size_t device) override;
  std::optional<MicroBatch> take_over(std::size_t device, double now) override;
  void hand_out(MicroBatch& next, double now) override;
  [[nodiscard]] bool has_own(std::size_t device) const override { return parts_[device].begin < parts_[device].end; }
  [[nodiscard]] bool nothing_left() const override;
  [[nodiscard]] bool came_early(std::size_t device) const override;
  void runs_dry(std::size_t device) override { parts_[device].held.clear(); }

  std::optional<MicroBatch> take_correction(std::size_t device, double now);
  std::optional<MicroBatch> steal(std::size_t device, double now);
  /// When a device will have run what is planned for it.
  [[nodiscard]] double finish_of(std::size_t device, double now) const;
  [[nodiscard]] double own_seconds(std::size_t device) const;
  [[nodiscard]] double held_seconds(std::size_t device) const;
  [[nodiscard]] std::int64_t run_ahead(std::size_t device) const;
  [[nodiscard]] std::int64_t own_piece(std::size_t device) const;

  StepOptions options_;
  std::vector<Part> parts_;
  std::int64_t pool_begin_ = 0;
  std::int64_t pool_end_ = 0;
  std::int64_t grain_ = 1;  // of corrections and steals: the granularity, but not less than the least items
  std::int64_t floor_ = 1;
};

}  // namespace paceline::engine
