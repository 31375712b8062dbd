// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>

#include "balance/size_search.hpp"
#include "engine/loop/memory_caps.hpp"

namespace paceline::engine {

class Claims;

/// The pieces in which the devices of one step work off their claims: micro-batches of the size that was found to be
/// fast, or is on trial, cut further where memory asks for it. Each device touches only what is its own.
class StepPieces {
 public:
  /// `search`: null where claims are not cut to find a size. `script`: exactly these pieces, for each device; empty:
  /// none.
  StepPieces(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<MemoryCaps> caps,
             std::shared_ptr<balance::SizeSearch> search, std::int64_t least_items,
             std::vector<std::vector<MicroBatch>> script);

  /// Runs a claim. `current` is the piece that runs. Returns what StepProgram::run() does: true if no piece's time is
  /// evidence. @throws Cancelled between two pieces once `claims` are cancelled.
  bool run(const MicroBatch& claim, StepProgram& program, const Claims& claims, MicroBatch& current);

  // When the step is over.
  /// What ran, by device in the order it ran; empty if all claims ran whole.
  [[nodiscard]] std::vector<MicroBatch> ran() const;
  /// How many pieces ran.
  [[nodiscard]] std::int64_t count() const;
  /// Whether a device ran several micro-batches, not counting those that memory asked for.
  [[nodiscard]] bool divided() const;
  /// Tells the search, if any, what it wants to know of a step that was committed.
  void commit() const;
  [[nodiscard]] bool scripted() const { return !script_.empty(); }

 private:
  using Span = std::pair<std::int64_t, std::int64_t>;
  struct alignas(64) DeviceState {  // padded, so that neighbours do not share a cache line
    std::vector<MicroBatch> ran;
    balance::TimedClaims timed;
  };

  [[nodiscard]] std::vector<Span> spans(const MicroBatch& claim) const;
  bool run_span(const MicroBatch& claim, Span span, StepProgram& program, const Claims& claims, MicroBatch& current);
  bool run_piece(const MicroBatch& claim, Span piece, StepProgram& program, const Claims& claims, MicroBatch& current);

  std::shared_ptr<const BatchPlan> plan_;
  std::shared_ptr<MemoryCaps> caps_;
  std::shared_ptr<balance::SizeSearch> search_;
  std::int64_t least_items_;
  std::vector<std::vector<MicroBatch>> script_;
  std::vector<DeviceState> devices_;
};

}  // namespace paceline::engine
