// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

namespace paceline {

/// While it lives, new pages that the calling thread touches, or that a driver pins on its behalf, come from this NUMA
/// node where it has some left. Best effort: a node below 0 and a system that refuses (sandboxes do) change nothing.
class PreferredNode {
 public:
  explicit PreferredNode(int node) noexcept;
  ~PreferredNode();
  PreferredNode(const PreferredNode&) = delete;
  PreferredNode& operator=(const PreferredNode&) = delete;

  /// The node that the calling thread's pages come from by preference; -1 where there is none.
  [[nodiscard]] static int current() noexcept;

 private:
  // As the kernel has it: one bit per node, and more of them than any kernel is built for.
  using Nodes = std::array<unsigned long, 16>;
  static bool read(int& mode, Nodes& nodes) noexcept;

  bool set_ = false;
  int mode_before_ = 0;
  Nodes nodes_before_{};
};

}  // namespace paceline
