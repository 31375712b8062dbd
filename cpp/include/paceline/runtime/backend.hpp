// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/async.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_health.hpp>
#include <paceline/runtime/gpu_facts.hpp>

namespace paceline {

/// One kind of device, as groups and engines see it. Every method may be called from any thread; state is the process's
/// (which devices are split), never the object's.
///
/// A further kind is one more implementation in the list that backends() returns; nothing above this interface names a
/// kind.
class PACELINE_API Backend {
 public:
  virtual ~Backend();

  [[nodiscard]] virtual DeviceKind kind() const noexcept = 0;
  /// What its devices' names begin with: "host".
  [[nodiscard]] virtual std::string_view prefix() const noexcept = 0;
  /// The devices that this process can use now, in order.
  [[nodiscard]] virtual std::vector<Device> devices() const = 0;
  /// Where devices() is empty: why, as the end of a sentence.
  [[nodiscard]] virtual std::string why_none() const;
  /// The device called `name`, which begins with prefix() and a colon.
  /// @throws InvalidArgument if it is malformed or there is none such.
  [[nodiscard]] virtual Device find(std::string_view name) const = 0;
  /// Called on the device's worker thread before its first task: affinity, current device. Best effort.
  virtual void prepare_worker(const Device& device) const noexcept = 0;
  /// True if a worker comes back from a micro-batch before the device has finished it. Engines then pace the workers by
  /// events, time micro-batches by the device's clock, and wait for nothing else.
  [[nodiscard]] virtual bool asynchronous() const noexcept = 0;
  /// Why its devices would take turns instead of working at the same time, as the beginning of a sentence: a setting of
  /// the process. Empty where nothing stands in the way.
  [[nodiscard]] virtual std::string why_in_turns() const;
  /// Streams, events and memory of an asynchronous device; null for others.
  /// @throws Error if the device refuses.
  [[nodiscard]] virtual std::unique_ptr<AsyncDevice> open(const Device& device) const;
  /// What the sensors and counters of these devices of its own say now; see health_of(). Nothing unless overridden.
  [[nodiscard]] virtual std::vector<DeviceHealth> health(std::span<const Device> devices) const;
  /// See paceline::partition(), which has checked the fractions. Refuses unless overridden.
  [[nodiscard]] virtual std::vector<Device> partition(const Device& device, std::span<const double> fractions) const;
  /// See paceline::release_partitions().
  virtual void release_partitions(const Device& device, std::chrono::nanoseconds timeout) const;
  /// See paceline::gpu_facts(). None unless overridden.
  [[nodiscard]] virtual std::vector<GpuFacts> gpu_facts() const;
};

/// The backends of this build, those worth using first in front.
[[nodiscard]] PACELINE_API std::span<const Backend* const> backends() noexcept;

/// The backend that `device` belongs to.
/// @throws Unavailable for a kind that this build lacks.
[[nodiscard]] PACELINE_API const Backend& backend_of(const Device& device);

}  // namespace paceline
