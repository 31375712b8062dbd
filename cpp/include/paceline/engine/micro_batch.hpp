// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <paceline/device_id.hpp>

namespace paceline {

/// What one forward and backward runs: items [begin, end) of the global batch, on one device.
struct MicroBatch {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  DeviceId device{};
  /// True only if this device gets no further micro-batch in this step. False does not promise another one: the device
  /// may ask for a correction and find none.
  bool last = false;
  bool correction = false;  ///< it comes from the common pool, or was planned for another device
  bool continues = false;   ///< it is a piece of a claim, and an earlier piece of this claim has just run
  bool measure = false;     ///< StepProgram::memory_bytes will be asked for its memory

  /// With costs, the indices of its items in the caller's batch, longest first; begin and end are then positions in the
  /// step's BatchPlan. Valid while the micro-batch runs. Empty without costs: the items are [begin, end).
  std::span<const std::int64_t> items{};

  [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
};

}  // namespace paceline
