// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

/// What one forward and backward runs: items [begin, end) of the global batch, on one device.
struct MicroBatch {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t device_index = 0;  ///< position in the group
  /// True only if this device gets no further micro-batch in this step. False does not mean that there is one: a device
  /// that still hoped for a correction may find that there is none.
  bool last = false;
  bool correction = false;  ///< from the common pool, or planned for another device
  bool continues = false;   ///< another part of what the device claimed has just run
  bool measure = false;     ///< its memory is asked for afterwards, see StepProgram::memory_bytes

  /// Where items have costs, and positions [begin, end) are those of the step's BatchPlan: the indices of its items in
  /// the caller's batch, longest first. Valid while the micro-batch runs. Empty: the items are [begin, end) themselves.
  std::span<const std::int64_t> items{};

  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
};

}  // namespace paceline
