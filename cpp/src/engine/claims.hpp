// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>

#include <paceline/engine/micro_batch.hpp>
#include <paceline/export.hpp>

namespace paceline::engine {

/// Who runs which items: the one state through which every claim of a step goes. Thread-safe. Every item is handed out
/// exactly once, unless cancelled.
class PACELINE_API Claims {
 public:
  virtual ~Claims() = default;
  /// The next micro-batch of `device`, which is free at `now_seconds` on the step's clock; none when it is done.
  virtual std::optional<MicroBatch> claim(std::size_t device, double now_seconds) = 0;
  /// After claim() came back empty: whether the device should claim once more when it has done all that it holds.
  [[nodiscard]] virtual bool asks_again(std::size_t /*device*/) { return false; }
  /// Whether nothing is left to hand out: a device that has not come for anything by now need not be waited for.
  [[nodiscard]] virtual bool exhausted() = 0;
  /// From now on every claim comes back empty.
  virtual void cancel() = 0;
  [[nodiscard]] bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

 protected:
  std::atomic<bool> cancelled_{false};
};

}  // namespace paceline::engine
