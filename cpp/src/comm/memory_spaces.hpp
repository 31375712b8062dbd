// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

#include "comm/clique.hpp"

namespace paceline::internal {

/// Devices that share memory, and the stream on which a communicator works for them.
struct Space {
  std::vector<std::size_t> members;  ///< indices in the group
  Rank rank;
  std::unique_ptr<Event> done;  ///< all that was enqueued so far
  std::unique_ptr<Buffer> scratch;
  std::unique_ptr<Buffer> landing;  ///< for what comes from the host
  [[nodiscard]] std::size_t lead() const { return members.front(); }
};

/// The asynchronous devices of a group by memory space, and how their work is ordered with the streams of those who
/// own the buffers. Host devices are only listed.
class MemorySpaces {
 public:
  explicit MemorySpaces(const DeviceGroup& group);

  [[nodiscard]] std::span<Space> spaces() noexcept { return spaces_; }
  /// Where what the host has comes in: the first GPU's.
  [[nodiscard]] Space& home() noexcept { return spaces_.front(); }
  [[nodiscard]] const std::vector<std::size_t>& host_devices() const noexcept { return host_; }
  [[nodiscard]] bool on_host(std::size_t device) const { return lanes_[device].device == nullptr; }
  [[nodiscard]] Space& space_of(std::size_t device) { return spaces_[lanes_[device].space]; }
  [[nodiscard]] std::vector<Rank> ranks() const;

  /// What the spaces' streams do from now on comes after what the buffers' streams have been given.
  void enter(std::span<const BufferView> buffers);
  /// What the buffers' streams are given from now on comes after what their own space's stream does, or everyone's.
  enum class Until { own_space, every_space };
  void leave(std::span<const BufferView> buffers, Until until);

  /// Pinned memory, by number. It grows, and is kept until the end: giving it back waits for all work of the GPU.
  [[nodiscard]] void* staging(std::size_t which, std::size_t bytes);
  /// Memory of that space, for use on its stream.
  [[nodiscard]] static void* reserve(const Space& space, std::unique_ptr<Buffer>& buffer, std::size_t bytes);

  /// Waits until all is done that was enqueued before the last leave().
  /// @throws Timeout naming the device, Error if a device has failed
  void wait(std::chrono::nanoseconds timeout) const;
  /// Gives everything back once that is done; what is not done by then stays for good, since it may still be in use.
  /// @throws what the poll hook of waits does (Ctrl-C): then, too, what was there stays for good
  void close(std::chrono::nanoseconds timeout);
  void leak() noexcept;

 private:
  struct Lane {
    std::size_t space = 0;
    std::string name;
    std::unique_ptr<AsyncDevice> device;  // null for the host's
    std::unique_ptr<Event> ready;         // what its buffer's stream was given
  };

  [[noreturn]] void throw_late(std::chrono::nanoseconds timeout) const;

  std::vector<Lane> lanes_;
  std::vector<Space> spaces_;
  std::vector<std::size_t> host_;
  std::vector<std::vector<std::unique_ptr<Buffer>>> staging_;
  bool used_ = false;
};

}  // namespace paceline::internal
