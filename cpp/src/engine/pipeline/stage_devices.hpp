// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

#include "engine/hang.hpp"

namespace paceline::internal {

/// The devices of a pipeline's group: the stream that each one computes on, and its memory.
class StageDevices {
 public:
  StageDevices(const DeviceGroup& group, std::chrono::nanoseconds timeout);

  [[nodiscard]] std::vector<DeviceId> ids() const { return devices_.ids(); }
  /// The device that plans know by its place in the group.
  [[nodiscard]] DeviceId at(std::size_t place) const { return devices_.id(place); }
  [[nodiscard]] const std::string& name(DeviceId device) const { return devices_[device].name; }
  /// Whether any device works after the call.
  [[nodiscard]] bool asynchronous() const noexcept { return pinning_ != nullptr; }
  /// Null for a host device, as its stream.
  [[nodiscard]] AsyncDevice* opened(DeviceId device) const { return devices_[device].opened.get(); }
  [[nodiscard]] Stream* work(DeviceId device) const { return devices_[device].work.get(); }
  /// Devices with equal numbers share memory.
  [[nodiscard]] std::size_t space(DeviceId device) const { return devices_[device].space; }
  [[nodiscard]] std::chrono::nanoseconds timeout() const noexcept { return timeout_; }

  /// Memory of a device, in the order of its stream; pinned for a host device beside GPUs.
  /// @throws OutOfMemory that names the device.
  [[nodiscard]] std::unique_ptr<Buffer> allocate(DeviceId device, std::size_t bytes) const;
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::size_t bytes) const {
    return pinning_->allocate_pinned(bytes);
  }
  void zero(DeviceId device, void* data, std::size_t bytes) const;

  /// @throws Timeout; from then on check() throws.
  void await(const Event& event) const { hung_.await(event, timeout_); }
  [[nodiscard]] const Hang& hung() const noexcept { return hung_; }
  void check() const { hung_.check("pipeline"); }
  /// Returns when a stream has no work left, or its device has failed or hangs.
  void drain(AsyncDevice* device, Stream* stream) noexcept;
  /// The same for every device's stream.
  void drain() noexcept;

 private:
  struct Entry {
    std::string name;
    std::size_t space = 0;
    std::unique_ptr<AsyncDevice> opened;
    std::unique_ptr<Stream> work;
  };
  PerDevice<Entry> devices_;
  AsyncDevice* pinning_ = nullptr;  // the first GPU, or null
  std::chrono::nanoseconds timeout_;
  Hang hung_;
};

}  // namespace paceline::internal
