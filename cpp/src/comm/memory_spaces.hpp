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

#include "comm/link.hpp"

namespace paceline::internal {

/// Devices that share memory, and the stream that data enters and leaves it on.
struct Space {
  std::vector<std::size_t> members;  ///< places in the group
  Endpoint endpoint;
  std::unique_ptr<Event> done;  ///< behind all work enqueued so far; null before the first work
  std::unique_ptr<Buffer> scratch;
  std::unique_ptr<Buffer> landing;  ///< for data from the host
  [[nodiscard]] std::size_t lead() const { return members.front(); }
};

/// The asynchronous devices of a group by memory space. Communicators and trainers are built on it. Host devices have
/// no space here; they are only listed. A device is its place in the group, as its buffer has in a collective's list.
/// For communicators the class orders the spaces' streams with the streams of the buffers' owners.
class MemorySpaces {
 public:
  explicit MemorySpaces(const DeviceGroup& group);

  [[nodiscard]] std::span<Space> spaces() noexcept { return spaces_; }
  /// The first GPU's space. Data of host devices enters here.
  [[nodiscard]] Space& home() noexcept { return spaces_.front(); }
  [[nodiscard]] const std::vector<std::size_t>& host_devices() const noexcept { return host_; }
  [[nodiscard]] bool on_host(std::size_t device) const { return devices_[device].device == nullptr; }
  /// Null for host devices.
  [[nodiscard]] AsyncDevice* device(std::size_t device) const { return devices_[device].device.get(); }
  /// The index of a device's space. For host devices it is the number of spaces.
  [[nodiscard]] std::size_t index_of_space(std::size_t device) const {
    return on_host(device) ? spaces_.size() : devices_[device].space;
  }
  [[nodiscard]] Space& space_of(std::size_t device) { return spaces_[devices_[device].space]; }
  [[nodiscard]] std::vector<Endpoint> endpoints() const;
  /// How copies between the spaces go: "by PCIe peer access", "by NVLink", "through the host", or which pairs how.
  [[nodiscard]] std::string routes() const;

  /// Work enqueued on the spaces' streams from now on runs after the work that the buffers' streams already have.
  void enter(std::span<const BufferView> buffers);
  /// The same for a buffer of one device and the stream of any space.
  void enter(std::size_t device, const BufferView& buffer, const Space& space);
  /// Work enqueued on the buffers' streams from now on runs after the work of every space's stream.
  void leave(std::span<const BufferView> buffers);
  /// Work enqueued on the buffer's stream from now on runs after the work of the space's stream.
  void leave(std::size_t device, const BufferView& buffer, Space& space);

  /// Pinned memory, by number. It grows, and is kept until the end, because releasing it waits for all work of the GPU.
  [[nodiscard]] void* staging(std::size_t which, std::size_t bytes);
  /// Memory of the space, for use on its stream.
  [[nodiscard]] static void* reserve(const Space& space, std::unique_ptr<Buffer>& buffer, std::size_t bytes) {
    return internal::reserve(buffer, bytes, *space.endpoint.opened, *space.endpoint.stream);
  }

  /// Waits until all work enqueued before the last leave() is done.
  /// @throws Timeout naming the device, Error if a device has failed
  void wait(std::chrono::nanoseconds timeout) const;
  /// Waits for that work, then releases everything. If the work does not end in time, everything is kept for good,
  /// because it may still be in use.
  /// @throws what the poll hook of waits throws (Ctrl-C); then, too, everything is kept for good
  void close(std::chrono::nanoseconds timeout);
  void leak() noexcept;

 private:
  struct Entry {
    std::size_t space = 0;
    std::string name;
    std::unique_ptr<AsyncDevice> device;  // null for host devices
    std::unique_ptr<Event> ready;         // behind the work of its buffer's stream; null before its first call
  };

  static void record_done(Space& space);
  [[noreturn]] void throw_late(std::chrono::nanoseconds timeout) const;

  std::vector<Entry> devices_;
  std::vector<Space> spaces_;
  std::vector<std::size_t> host_;
  std::vector<std::vector<std::unique_ptr<Buffer>>> staging_;
};

}  // namespace paceline::internal
