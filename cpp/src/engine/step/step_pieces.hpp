// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>

#include "balance/size_search.hpp"
#include "engine/loop/memory_caps.hpp"

namespace paceline::internal {

class WorkQueue;

/// Each device's claims must be cut into its pieces without a gap, because an item outside of all pieces would not run.
/// @throws InvalidArgument otherwise
void check_pieces(const StepScript& script);

/// Runs the claims of one step in pieces. A piece is a micro-batch of the size that the search has found to be fast, or
/// has on trial. Where memory is short it is cut further. Each device touches only its own state.
class StepPieces {
 public:
  /// Claims run whole.
  explicit StepPieces(std::size_t device_count) : devices_(device_count) {}
  /// `search`: null if no size is searched for. `script`: exactly these pieces for each device; may be empty.
  StepPieces(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<MemoryCaps> caps,
             std::shared_ptr<balance::SizeSearch> search, std::int64_t least_items,
             std::vector<std::vector<MicroBatch>> script);

  /// Runs a claim, and keeps the running piece in `current`. Like StepProgram::run() it returns true if the time is no
  /// evidence. @throws Cancelled between two pieces if `queue` is cancelled.
  bool run(const MicroBatch& claim, StepProgram& program, const WorkQueue& queue, MicroBatch& current);

  // When the step is over.
  /// The pieces that ran, by device and in their order. Empty if all claims ran whole.
  [[nodiscard]] std::vector<MicroBatch> ran() const;
  /// How many pieces ran.
  [[nodiscard]] std::int64_t count() const;
  /// Whether a device ran several micro-batches, not counting the cuts because of memory.
  [[nodiscard]] bool divided() const;
  /// Gives the times of a committed step to the search, if there is one.
  void commit() const;
  [[nodiscard]] bool scripted() const { return !script_.empty(); }

 private:
  using Span = std::pair<std::int64_t, std::int64_t>;
  struct alignas(64) DeviceState {  // padded, so that neighbours do not share a cache line
    std::vector<MicroBatch> ran;
    std::int64_t claims = 0;     // that ran
    std::int64_t spans = 0;      // that they were divided into, not counting the cuts because of memory
    balance::TimedClaims timed;  // for the search; empty if there is none
  };

  [[nodiscard]] std::vector<Span> spans(const MicroBatch& claim) const;
  void run_in_memory(Span span, StepProgram& program, MicroBatch& current, const std::function<void(Span)>& run_piece);

  std::shared_ptr<const BatchPlan> plan_;
  std::shared_ptr<MemoryCaps> caps_;
  std::shared_ptr<balance::SizeSearch> search_;
  std::int64_t least_items_ = 1;
  std::vector<std::vector<MicroBatch>> script_;
  std::vector<DeviceState> devices_;
};

}  // namespace paceline::internal
