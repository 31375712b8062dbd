// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/report.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/device_health.hpp>

namespace paceline {

/// Whether a device runs slower than the rest of its class, or than it did: only then somebody asks why.
[[nodiscard]] PACELINE_API bool needs_causes(const balance::DeviceReport& device) noexcept;

/// Samples of a group's devices: one when it is made, one whenever somebody asks why a device is slow. Not thread-safe.
class PACELINE_API HealthLog {
 public:
  using Samples = std::vector<DeviceHealth>;
  /// One sample of each device, at one moment.
  using Sampler = std::function<Samples(std::span<const Device>)>;

  /// @param sampler null: health_of().
  explicit HealthLog(std::vector<Device> devices, Sampler sampler = {});

  /// Per device of the report, what may have slowed it down since the last time that was asked, or since the beginning;
  /// empty where it is not slow or nothing was noticed. Asked again without a step in between, it says the same: idle
  /// devices would only dilute it.
  [[nodiscard]] std::vector<std::string> causes(const balance::BalanceReport& report);

 private:
  std::vector<Device> devices_;
  Sampler sampler_;
  Samples before_;
  Samples after_;
  std::int64_t steps_ = 0;  // that had run when after_ was taken
};

}  // namespace paceline
