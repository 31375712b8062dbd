// SPDX-License-Identifier: Apache-2.0
#include "runtime/preferred_node.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <limits>

// Direct system calls, because libnuma would be one more library to install for two lines.

namespace paceline {
namespace {

constexpr int kBits = std::numeric_limits<unsigned long>::digits;

template <class Nodes>
constexpr unsigned long bits_of(const Nodes& nodes) {
  return nodes.size() * kBits;
}

}  // namespace

bool PreferredNode::read(int& mode, Nodes& nodes) noexcept {
  return syscall(SYS_get_mempolicy, &mode, nodes.data(), bits_of(nodes), nullptr, 0UL) == 0;
}

PreferredNode::PreferredNode(int node) noexcept {
  Nodes wanted{};
  if (node < 0 || static_cast<unsigned long>(node) >= bits_of(wanted) || !read(mode_before_, nodes_before_)) return;
  wanted[static_cast<std::size_t>(node / kBits)] = 1UL << (node % kBits);
  set_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, wanted.data(), bits_of(wanted)) == 0;
}

PreferredNode::~PreferredNode() {
  if (!set_) return;
  // MPOL_DEFAULT takes no nodes, and some kernels insist on that.
  const bool none = mode_before_ == MPOL_DEFAULT;
  syscall(SYS_set_mempolicy, mode_before_, none ? nullptr : nodes_before_.data(), none ? 0UL : bits_of(nodes_before_));
}

int PreferredNode::current() noexcept {
  int mode = MPOL_DEFAULT;
  Nodes nodes{};
  if (!read(mode, nodes) || mode != MPOL_PREFERRED) return -1;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i] != 0) return static_cast<int>(i) * kBits + std::countr_zero(nodes[i]);
  }
  return -1;
}

}  // namespace paceline
