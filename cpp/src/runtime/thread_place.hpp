// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <vector>

namespace paceline::internal {

/// Pins the calling thread to these cores; an empty list means no change. Best effort: if the system refuses the mask,
/// because cores were taken away since discovery, the thread stays where it was.
void pin_this_thread(const std::vector<int>& cores) noexcept;

/// While this object lives, new pages that the calling thread touches, or that a driver pins for it, come from this
/// NUMA node if it has free pages. Best effort: it does nothing for a node below 0 or where the system refuses
/// (sandboxes do).
class PreferredNode {
 public:
  explicit PreferredNode(int node) noexcept;
  ~PreferredNode();
  PreferredNode(const PreferredNode&) = delete;
  PreferredNode& operator=(const PreferredNode&) = delete;

  /// The calling thread's preferred node; -1 if it has none.
  [[nodiscard]] static int current() noexcept;

 private:
  // The kernel's format: one bit per node. Large enough for every kernel.
  using Nodes = std::array<unsigned long, 16>;
  static bool read(int& mode, Nodes& nodes) noexcept;

  bool set_ = false;
  int mode_before_ = 0;
  Nodes nodes_before_{};
};

}  // namespace paceline::internal
