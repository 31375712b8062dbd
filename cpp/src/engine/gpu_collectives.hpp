// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/async_device.hpp>

#include "comm/link.hpp"

namespace paceline::internal {

/// What a step moves between the memory spaces of several GPUs by their own library: home's parameters to every other
/// one, and the sums of all to home. Each has one stream, its rank's, on which all of it is enqueued.
///
/// The library's kernels reach into the memory of other GPUs, so they are given nothing but memory that it has
/// allocated: what came from allocate() is used where it lies; parameters that somebody else holds, as PyTorch does, go
/// through a stretch of bounded size on either side.
class GpuCollectives {
 public:
  /// `spaces[r]`: whose rank r is. At most `staging_bytes` of each GPU are for parameters on their way;
  /// `timeout` is for waits of the host, which only growing buffers need.
  GpuCollectives(std::unique_ptr<NativeLink> link, std::vector<Endpoint> endpoints, std::vector<std::size_t> spaces,
                 std::size_t home_space, std::size_t staging_bytes, std::chrono::nanoseconds timeout);
  /// Requires: nothing enqueued, unless lost() or told to keep its memory.
  ~GpuCollectives();
  GpuCollectives(const GpuCollectives&) = delete;
  GpuCollectives& operator=(const GpuCollectives&) = delete;

  [[nodiscard]] std::string description() const { return link_->description(); }
  [[nodiscard]] std::span<const std::size_t> spaces() const noexcept { return spaces_; }
  /// Memory of that space for use with the collectives; see NativeLink::allocate().
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::size_t space, std::size_t bytes, Stream& stream);

  /// Does the copies to the GPUs' memory spaces; those to others it leaves out.
  void broadcast(std::span<const SpaceCopy> copies);
  /// Makes room for as many sums as there are sizes. Waits for the GPUs where a sum grows, which is seldom.
  void reserve(std::span<const std::size_t> bytes);
  /// The k-th sum of a rank: its own before reduce(), at home everyone's afterwards.
  [[nodiscard]] void* sum(std::size_t rank, std::size_t k) const { return sums_[k][rank]->data(); }
  void reduce(std::size_t k, std::size_t count, DType dtype);

  /// Throws what has failed since the last call, once.
  void check() { link_->check(); }
  /// See NativeLink::keep_memory().
  void keep_memory(bool keep) noexcept { link_->keep_memory(keep); }
  [[nodiscard]] bool lost() const noexcept { return link_->lost(); }

 private:
  using Buffers = std::vector<std::unique_ptr<Buffer>>;  // one for each rank

  /// Something of home's, and where every rank wants it; null where it does not.
  struct Piece {
    const void* from = nullptr;
    std::size_t bytes = 0;
    std::vector<void*> to;
  };
  /// A part of one, and where in the staging memory it travels.
  struct Section {
    const Piece* piece = nullptr;
    std::size_t begin = 0;
    std::size_t bytes = 0;
    std::size_t offset = 0;
  };

  [[nodiscard]] std::vector<Piece> pieces_of(std::span<const SpaceCopy> copies) const;
  [[nodiscard]] std::size_t rank_of(std::size_t space) const;  // how many there are: none
  [[nodiscard]] bool is_own(const void* data, std::size_t bytes) const;
  [[nodiscard]] bool is_own(const Piece& piece) const;
  [[nodiscard]] Buffers make(std::size_t bytes);
  void stage(std::span<const Piece> pieces);
  void send(std::span<const Section> sections, std::size_t bytes);
  void settle();

  std::unique_ptr<NativeLink> link_;
  std::vector<Endpoint> endpoints_;
  std::vector<std::size_t> spaces_;
  std::size_t root_;
  std::size_t staging_bytes_;
  std::chrono::nanoseconds timeout_;
  pid_t owner_;
  std::vector<std::pair<const char*, std::size_t>> own_;  // what allocate() has given
  std::vector<Buffers> sums_;
  Buffers staging_;
};

}  // namespace paceline::internal
