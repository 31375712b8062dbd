// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <paceline/balance/size_search.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/per_device.hpp>

#include "engine/step/memory_caps.hpp"
#include "engine/step/short_pieces.hpp"

namespace paceline::internal {

/// Cuts the claims of one step into pieces, each of which a worker takes by itself. A piece is a micro-batch of the
/// size that the search has found to be fast, or has on trial, or so short that other work soon has its turn. Where
/// memory is short it is cut further. Each device touches only its own state.
class StepPieces {
 public:
  /// Claims run whole.
  explicit StepPieces(std::span<const DeviceId> devices) : devices_(devices) {}
  /// `search`: null if no size is searched for. `script`: exactly these pieces for each device; may be empty.
  StepPieces(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<MemoryCaps> caps,
             std::shared_ptr<balance::SizeSearch> search, std::int64_t least_items,
             std::vector<std::vector<MicroBatch>> script);
  /// Pieces end within so many seconds. The search then tries nothing, and its size is the largest one.
  void shorten(std::shared_ptr<ShortPieces> shorter, double seconds);

  /// The device has this claim now, and has run the one before.
  void begin(const MicroBatch& claim);
  /// The next piece of the device's claim; none when all have run.
  [[nodiscard]] std::optional<MicroBatch> next(DeviceId device);
  /// The device has run that piece, on the thread that calls this, in that time. `evidence`: which is usual.
  void measure(const MicroBatch& piece, StepProgram& program);
  void ran(const MicroBatch& piece, double seconds, bool evidence);
  /// Whether the times of the device's claim are no evidence, because a size is on trial.
  [[nodiscard]] bool on_trial() const;

  // When the step is over.
  /// The pieces that ran, by device and in their order. Empty if all claims ran whole.
  [[nodiscard]] std::vector<MicroBatch> ran() const;
  /// How many pieces ran.
  [[nodiscard]] std::int64_t count() const;
  /// Whether a device ran several micro-batches, not counting the cuts because of memory.
  [[nodiscard]] bool divided() const;
  /// Gives the times of a committed step to the search, if there is one.
  void commit() const;
  [[nodiscard]] bool scripted() const { return script_.size() > 0; }

 private:
  using Span = std::pair<std::int64_t, std::int64_t>;
  struct alignas(64) DeviceState {  // padded, so that neighbours do not share a cache line
    std::vector<MicroBatch> ran;
    std::int64_t claims = 0;     // that ran
    std::int64_t spans = 0;      // that they were divided into, not counting the cuts because of memory
    balance::TimedClaims timed;  // for the search; empty if there is none
    // Of the claim that it has.
    MicroBatch claim;
    std::vector<Span> spans_left;  // the last one first
    std::vector<Span> cuts;        // of the span, because of memory; the last one first
    Span rest{};                   // of the span: not cut yet
    bool probing = false;          // the piece that runs says whether the rest of the span needs another one
    bool learns = false;           // whether sizes of the span may still be measured
  };

  [[nodiscard]] std::vector<Span> spans(const MicroBatch& claim) const;
  [[nodiscard]] bool searches() const { return search_ != nullptr && shorter_ == nullptr; }
  [[nodiscard]] Span cut(DeviceState& state, bool& measured);

  std::shared_ptr<const BatchPlan> plan_;
  std::shared_ptr<MemoryCaps> caps_;
  std::shared_ptr<balance::SizeSearch> search_;
  std::shared_ptr<ShortPieces> shorter_;
  double seconds_ = 0.0;  // of a piece that is shorter
  std::int64_t least_items_ = 1;
  PerDevice<std::vector<MicroBatch>> script_;  // no device: there is no script
  PerDevice<DeviceState> devices_;
};

}  // namespace paceline::internal
