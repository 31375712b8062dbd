// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>

#include <paceline/comm/space_copy.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline::internal {

/// A GPU that gets copies of home's memory.
struct CopyTarget {
  AsyncDevice* device = nullptr;
  std::function<Stream&()> on{};  ///< the stream for it, asked for before each call
  Event* relayed = nullptr;       ///< of the stream's device
  std::span<const SpaceCopy> copies{};
};

/// Enqueues the copies of home's memory. With `relays`, where several targets get the same memory, and enough of it,
/// they form a chain: the first one pulls from home, and each other one from the one before it, in pieces. So no GPU
/// sends or gets a byte twice, and all links of the chain carry at once. Otherwise all get it from home. Where they
/// have no access to home's memory, it goes to the host once for all of them (AsyncDevice::copy_to_all).
///
/// A target pulls a piece from another one after that one has got it: its stream waits for `relayed`. Requires: the
/// targets' memory is written again only after the work of all their streams.
void copy_to_all(AsyncDevice& home, std::span<const CopyTarget> targets, bool relays);

}  // namespace paceline::internal
