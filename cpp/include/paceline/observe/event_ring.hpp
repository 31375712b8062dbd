// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/export.hpp>

namespace paceline::observe {

enum class EventKind : std::uint8_t {
  step,         ///< one whole step; begin and end are 0 and the batch size
  micro_batch,  ///< items [begin, end) on one device
  reduction,    ///< from the last micro-batch's end to the end of the reduction
  move,         ///< the shares changed before this step
  forward,      ///< of items [begin, end) on one stage of a pipeline
  backward,     ///< the same
};

/// Something that happened. Seconds count on a steady clock from a moment that the writer chooses; a StepLoop's clock
/// starts when the StepLoop is made.
struct TraceEvent {
  EventKind kind = EventKind::step;
  std::optional<DeviceId> device{};  ///< none: the group as a whole
  std::int64_t step = 0;             ///< the number of steps that had succeeded before it
  std::int64_t begin = 0;            ///< items of the batch, [begin, end); both 0 if the event is not about items
  std::int64_t end = 0;
  double start_seconds = 0.0;
  double duration_seconds = 0.0;
};

/// The last `capacity` events, oldest first. Writers never wait for readers longer than one copy. Thread-safe.
class PACELINE_API EventRing {
 public:
  /// @param capacity events to keep, all allocated at once; 0 counts as 1.
  explicit EventRing(std::size_t capacity = 4096);

  /// Constant time; allocates nothing.
  void push(const TraceEvent& event);
  [[nodiscard]] std::vector<TraceEvent> snapshot() const;

 private:
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
  std::size_t capacity_;
  std::uint64_t pushed_ = 0;
};

/// "micro_batch" and so on; "unknown" for a value that is no EventKind.
[[nodiscard]] PACELINE_API const char* name_of(EventKind kind) noexcept;

}  // namespace paceline::observe
