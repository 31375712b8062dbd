// SPDX-License-Identifier: Apache-2.0
#include "runtime/thread_place.hpp"

#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>

// The memory policy is set by system calls, because libnuma would be one more library to install for two lines.

namespace paceline::internal {
namespace {

constexpr int kBits = std::numeric_limits<unsigned long>::digits;

template <class Nodes>
constexpr unsigned long bits_of(const Nodes& nodes) {
  return nodes.size() * kBits;
}

}  // namespace

void pin_this_thread(const std::vector<int>& cores) noexcept {
  if (cores.empty()) return;
  const auto count = static_cast<std::size_t>(*std::max_element(cores.begin(), cores.end())) + 1;
  cpu_set_t* mask = CPU_ALLOC(count);
  if (mask == nullptr) return;
  const std::size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, mask);
  for (const int core : cores) CPU_SET_S(static_cast<std::size_t>(core), bytes, mask);
  pthread_setaffinity_np(pthread_self(), bytes, mask);
  CPU_FREE(mask);
}

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

}  // namespace paceline::internal
