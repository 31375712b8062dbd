// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/per_device.hpp>

#include "plan/line_fit.hpp"

namespace paceline::internal {

/// Cuts what devices run of one kind of batch into micro-batches that end within so many seconds, since other work may
/// have to wait for one of them.
///
/// Each device learns from its own pieces. The last piece of a claim is half as long as the others, and the line
/// through the times of both lengths says what a piece takes apart from its items. Where this part alone is long,
/// shorter pieces would mostly repeat it, so pieces are no shorter than twice that. Sizes come down from whole claims
/// by halves, so that no step runs in very short pieces before that part is known. Each device touches only its own
/// state.
class ShortPieces {
 public:
  using Span = std::pair<std::int64_t, std::int64_t>;

  explicit ShortPieces(std::span<const DeviceId> devices) : devices_(devices) {}

  /// Items [begin, end) in pieces that end within so many seconds, and have at most so many items.
  [[nodiscard]] std::vector<Span> pieces(DeviceId device, std::int64_t begin, std::int64_t end, double seconds,
                                         std::optional<std::int64_t> most);
  /// The device has run so many items at once in that time.
  void ran(DeviceId device, std::int64_t items, double seconds);
  /// The most items of a piece of what was cut last; 0 if nothing was.
  [[nodiscard]] std::int64_t size(DeviceId device) const { return devices_[device].size; }

 private:
  struct alignas(64) DeviceState {  // padded, so that neighbours do not share a cache line
    plan::LineFit times{0.9};       // the last ten pieces or so count
    std::int64_t fewest = 0;        // items at once that were measured; 0: none were
    std::int64_t largest = 0;
    std::int64_t size = 0;
  };

  PerDevice<DeviceState> devices_;
};

}  // namespace paceline::internal
