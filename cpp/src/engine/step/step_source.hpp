// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "comm/block_reduction.hpp"
#include "engine/step/step_pieces.hpp"
#include "engine/step/work_queue.hpp"
#include "runtime/worker.hpp"

namespace paceline::internal {

/// A step as the workers see it: a source of micro-batches and, at the end, of the reduction. Each worker keeps it
/// alive until that worker has left, so a worker that wakes late still finds its state.
///
/// Each device goes through four stages: outside, until its worker asks for the first time; computing; waiting for the
/// others; over. A worker that comes when all is done, or that has no share, goes on to waiting at once. The device
/// that leaves computing last opens the reduction, and all workers take part in that.
class StepSource final : public WorkSource {
 public:
  /// Requires: options that fit the group, with pieces.
  StepSource(const DeviceGroup& group, std::shared_ptr<StepProgram> program, StepOptions options);

  /// Sets the step's clock to 0. Call it right before the workers get the step.
  void start_clock() { start_ = Clock::now(); }
  [[nodiscard]] Clock::time_point started() const noexcept { return start_; }

  [[nodiscard]] NextWork next(DeviceId device, Clock::time_point now) noexcept override;
  void perform(DeviceId device, std::int64_t work, Turn& turn) override;
  void done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept override;
  void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept override;
  void cancel(std::exception_ptr reason) noexcept override;
  [[nodiscard]] bool complete() const noexcept override { return settled_.load(std::memory_order_acquire); }

  [[nodiscard]] std::vector<bool> takes_part() const;

  // Call the rest when it is complete.
  [[nodiscard]] const StepFailure* failure() const noexcept { return failure_ ? &*failure_ : nullptr; }
  [[nodiscard]] StepRecord record() const;
  [[nodiscard]] std::vector<std::int64_t> items() const;
  [[nodiscard]] const StepProgram& program() const noexcept { return *program_; }

 private:
  enum class Stage : std::uint8_t { outside, computing, waiting, over };
  // A worker writes only the state of its own device; the reduction's opening publishes it. Padded, so that neighbours
  // do not share a cache line.
  struct alignas(64) DeviceState {
    std::size_t place = 0;  // in the lists of the options and the queue
    std::vector<ClaimRecord> claims;
    std::optional<ClaimRecord> claim;  // whose pieces it runs
    Clock::duration between{};         // in which it ran none of them
    Clock::time_point ended;           // of the last piece
    MicroBatch current;                // the piece
    Stage stage = Stage::outside;
    bool takes_part = true;
    LentTime lent;            // of the worker's thread: first when it began to compute, then since
    bool asks_again = false;  // it claims once more when it has run everything that it was given
    std::optional<Clock::time_point> waits_since;
  };

  [[nodiscard]] bool next_piece(DeviceState& state, DeviceId device);
  [[nodiscard]] NextWork next_micro_batch(DeviceState& state, DeviceId device, Clock::time_point now) noexcept;
  [[nodiscard]] NextWork wait_for(DeviceState& state, const Event& event, Clock::time_point now);
  [[nodiscard]] bool enter() noexcept;
  void leave(DeviceId device) noexcept;
  void open_reduction() noexcept;
  void settle_once() noexcept;
  void fail(std::exception_ptr error, const std::optional<MicroBatch>& micro_batch) noexcept;
  [[nodiscard]] double seconds_at(Clock::time_point time) const;
  [[nodiscard]] std::vector<std::optional<double>> startups(double first, double compute_seconds) const;
  [[nodiscard]] std::vector<std::optional<double>> arrivals(const std::vector<ClaimRecord>& claims) const;
  [[nodiscard]] std::vector<double> lent_parts(const std::vector<ClaimRecord>& claims) const;

  std::shared_ptr<StepProgram> program_;
  std::unique_ptr<internal::BlockReduction> reduction_;
  std::shared_ptr<StepPieces> pieces_;
  std::unique_ptr<WorkQueue> queue_;
  PerDevice<DeviceState> devices_;
  bool asynchronous_;
  bool scripted_;
  Clock::time_point start_{};
  std::atomic<std::uint32_t> inside_{0};  // workers that compute, and whether any more may enter
  std::atomic<int> phase_;
  std::atomic<bool> over_{false};
  std::atomic<bool> settled_{false};
  double reduced_at_ = 0.0;  // published by settled_
  std::mutex failure_mutex_;
  bool decided_ = false;  // whether it failed; under the lock
  std::optional<StepFailure> failure_;
};

}  // namespace paceline::internal
