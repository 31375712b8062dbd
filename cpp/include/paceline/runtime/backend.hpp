// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_health.hpp>
#include <paceline/runtime/gpu_facts.hpp>

namespace paceline {

/// One kind of device, as groups and engines see it. Any thread may call every method. State, such as which devices are
/// split, belongs to the process and not to the object.
///
/// To add a kind of device, implement this class, and have backends() list it. Code above this interface names no kind.
class PACELINE_API Backend {
 public:
  virtual ~Backend();

  [[nodiscard]] virtual DeviceKind kind() const noexcept = 0;
  /// The first part of its devices' names: "host".
  [[nodiscard]] virtual std::string_view prefix() const noexcept = 0;
  /// The devices that this process can use now, in order.
  [[nodiscard]] virtual std::vector<Device> devices() const = 0;
  /// Why devices() is empty, as the end of a sentence.
  [[nodiscard]] virtual std::string why_none() const;
  /// The device called `name`, which begins with prefix() and a colon.
  /// @throws InvalidArgument if the name is malformed or there is no such device.
  [[nodiscard]] virtual Device find(std::string_view name) const = 0;
  /// Called on a thread that is about to work on the device: affinity, current device. On the device's worker before
  /// its first task and whenever another group's work ran last, and on threads that borrow the worker's turn. Best
  /// effort.
  virtual void prepare_worker(const Device& device) const noexcept = 0;
  /// True if a worker returns from a micro-batch before the device has finished it. Engines then pace the workers by
  /// events and time micro-batches by the device's clock.
  [[nodiscard]] virtual bool asynchronous() const noexcept = 0;
  /// The setting of this process that makes its devices take turns instead of working at the same time, as the
  /// beginning of a sentence. Empty if there is none.
  [[nodiscard]] virtual std::string why_in_turns() const;
  /// Streams, events and memory of an asynchronous device; null for a synchronous device.
  /// @throws Error if the device refuses.
  [[nodiscard]] virtual std::unique_ptr<AsyncDevice> open(const Device& device) const;
  /// What the sensors and counters of these devices, all of this backend, say now; see health_of(). Empty unless
  /// overridden.
  [[nodiscard]] virtual std::vector<DeviceHealth> health(std::span<const Device> devices) const;
  /// See paceline::partition(), which has checked the fractions. Throws unless overridden.
  [[nodiscard]] virtual std::vector<Device> partition(const Device& device, std::span<const double> fractions) const;
  /// See paceline::release_partitions().
  virtual void release_partitions(const Device& device, std::chrono::nanoseconds timeout) const;
  /// See paceline::gpu_facts(). Empty unless overridden.
  [[nodiscard]] virtual std::vector<GpuFacts> gpu_facts() const;
};

/// The backends of this build, the preferred ones first.
[[nodiscard]] PACELINE_API std::span<const Backend* const> backends() noexcept;

/// The backend that `device` belongs to.
/// @throws Unavailable for a kind that this build lacks.
[[nodiscard]] PACELINE_API const Backend& backend_of(const Device& device);

}  // namespace paceline
