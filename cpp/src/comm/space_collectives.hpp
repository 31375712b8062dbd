// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/comm/space_copy.hpp>
#include <paceline/runtime/async_device.hpp>

#include "comm/link.hpp"

namespace paceline::internal {

/// Moves a step's data between the memory spaces of several GPUs by their own library: home's parameters to every other
/// space, and all sums to home. There is an endpoint for each space, home's first. All work of a space is enqueued on
/// its endpoint's stream.
///
/// The library's kernels access the memory of other GPUs, so they only get memory from allocate(), which is used in
/// place. Parameters in other memory, such as PyTorch's, travel through staging memory of bounded size on both sides.
class SpaceCollectives {
 public:
  /// At most `staging_bytes` of each GPU are for parameters under way.
  SpaceCollectives(std::unique_ptr<Link> link, std::vector<Endpoint> endpoints, std::size_t staging_bytes);
  ~SpaceCollectives();
  SpaceCollectives(const SpaceCollectives&) = delete;
  SpaceCollectives& operator=(const SpaceCollectives&) = delete;

  [[nodiscard]] std::string description() const { return link_->description(); }
  /// Memory of a space for the collectives. It returns in the order of `stream`.
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::size_t space, std::size_t bytes, Stream& stream);

  /// Does the copies to the spaces that have an endpoint, and skips the others.
  void broadcast(std::span<const SpaceCopy> copies);
  /// Makes room for sums of these sizes.
  void reserve(std::span<const std::size_t> bytes);
  /// The k-th sum of a space. After reduce() home's holds the sum of all spaces.
  [[nodiscard]] void* sum(std::size_t space, std::size_t k) const { return sums_[k][space]->data(); }
  void reduce(std::size_t k, std::size_t count, DType dtype);

  /// Throws what has failed since the last call, once.
  void check() { link_->check(); }
  [[nodiscard]] bool lost() const noexcept { return link_->lost(); }

 private:
  using Buffers = std::vector<std::unique_ptr<Buffer>>;  // one for each space

  /// A part of home's memory, and its target in every space; null where a space does not need it.
  struct Transfer {
    const void* from = nullptr;
    std::size_t bytes = 0;
    std::vector<void*> to;
  };
  /// A part of a transfer, and its offset in the staging memory.
  struct Section {
    const Transfer* transfer = nullptr;
    std::size_t begin = 0;
    std::size_t bytes = 0;
    std::size_t offset = 0;
  };

  [[nodiscard]] std::vector<Transfer> transfers_of(std::span<const SpaceCopy> copies) const;
  [[nodiscard]] bool is_own(const void* data, std::size_t bytes) const;
  [[nodiscard]] bool is_own(const Transfer& transfer) const;
  [[nodiscard]] Buffers make(std::size_t bytes);
  void stage(std::span<const Transfer> transfers);
  void send(std::span<const Section> sections, std::size_t bytes);

  std::unique_ptr<Link> link_;
  std::vector<Endpoint> endpoints_;
  std::size_t staging_bytes_;
  pid_t owner_;
  std::vector<std::pair<const char*, std::size_t>> own_;  // what allocate() has given
  std::vector<Buffers> sums_;
  Buffers staging_;
};

}  // namespace paceline::internal
