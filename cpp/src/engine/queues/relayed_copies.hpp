// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include <paceline/comm/space_copy.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

/// A GPU that gets copies of home's memory, on this stream.
struct CopyTarget {
  Stream* stream = nullptr;
  Event* relayed = nullptr;  ///< of the stream's device
  std::span<const SpaceCopy> copies{};
};

/// Enqueues the copies. With `relays`, where several targets get the same memory, and enough of it, each pulls an equal
/// part from home, and the other parts from those targets that have pulled them. So home sends each byte once.
///
/// A target pulls a part from another one after that one has got it: its stream waits for `relayed`. Requires: the
/// targets' memory is written again only after the work of all their streams.
void copy_to_all(std::span<const CopyTarget> targets, bool relays);

}  // namespace paceline::internal
