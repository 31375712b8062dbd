// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

/// The way from one GPU's memory to another's.
struct GpuLink {
  std::string from;
  std::string to;
  LinkKind kind = LinkKind::through_host;
  double bytes_per_second = 0.0;  ///< the target pulls; 0: not measured
  /// The source pushes: over PCIe a pull is a read, which has to wait for its answers. 0: not measured.
  double push_bytes_per_second = 0.0;
  bool pushed = false;  ///< how this library copies: see pushes_pay()

  /// The speed of the way that is used.
  [[nodiscard]] double used_bytes_per_second() const noexcept {
    return pushed && push_bytes_per_second > 0.0 ? push_bytes_per_second : bytes_per_second;
  }
};

/// The ways between several GPUs.
struct GpuLinks {
  std::vector<GpuLink> pairs{};  ///< both directions of each two GPUs
  /// What the first GPU sends in total when all others pull from it at once. 0: not measured, or fewer than three GPUs.
  double spread_bytes_per_second = 0.0;
  /// What each of the others gets when each of them pulls from the one before it at once. 0 as above.
  double exchange_bytes_per_second = 0.0;
};

/// Finds the links between the GPUs of the group, and measures them by timed copies of 32 MiB: at most one second, once
/// in a process. The pushes come last, where time is left. Each GPU lends 64 MiB. What cannot be measured (no memory
/// left, a GPU that is busy for a second) stays unknown until the next call; that is no error. Empty with fewer than
/// two GPUs.
///
/// From then on the source makes the copies of an ordered pair where pushes_pay(), whoever copies in this process. The
/// last measurement of a pair counts. What was not measured is pulled. If anything is pushed, the speeds of all GPUs at
/// once are those with pushes.
[[nodiscard]] PACELINE_API GpuLinks measure_links(const DeviceGroup& group);

/// Whether copies of one GPU's memory to another's shall be made by the source instead of the target: only if that is
/// faster by more than a tenth. False if a speed is 0, that is, unknown.
[[nodiscard]] PACELINE_API bool pushes_pay(double pull_bytes_per_second, double push_bytes_per_second) noexcept;

/// Whether the first GPU's memory reaches `others` GPUs sooner along a chain than if each pulls all of it from the
/// first GPU. In the chain each GPU pulls from the one before it. `exchange_bytes_per_second`: the slowest link of the
/// chain. True if a speed is 0, that is, unknown: relays are never much slower, and direct copies may be slower by the
/// number of GPUs.
[[nodiscard]] PACELINE_API bool relays_pay(std::size_t others, double spread_bytes_per_second,
                                           double exchange_bytes_per_second) noexcept;

}  // namespace paceline
