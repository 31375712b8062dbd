// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace paceline {

/// A copy out of home's memory that a memory space needs before its devices begin: parameters.
struct SpaceCopy {
  std::size_t space = 0;
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
  /// Copies of one bucket are awaited together (DeviceQueues::need). Copies come in the order of their
  /// buckets, and those of one space and bucket stand together.
  std::size_t bucket = 0;
};

}  // namespace paceline
