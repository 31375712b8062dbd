// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace paceline {

/// A copy out of home's memory that a memory space needs before its devices begin: parameters and buffers.
struct SpaceCopy {
  std::size_t space = 0;
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
  /// Copies of one bucket are awaited together (DeviceQueues::need). Copies come in the order of their
  /// buckets. Those of one space and bucket stand together, and so do those of them that may be relayed.
  std::size_t bucket = 0;
  /// Whether other spaces may pull it from this one. Not if a device writes to it during the step, as to buffers.
  /// Requires: those of one space and bucket that lie one behind the other in memory are of one allocation.
  bool relayed = true;
};

}  // namespace paceline
