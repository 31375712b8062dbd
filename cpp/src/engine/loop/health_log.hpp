// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/report.hpp>
#include <paceline/runtime/device_health.hpp>

namespace paceline::internal {

/// Whether a device runs slower than the rest of its class, or slower than before. Only then explain() asks for causes.
[[nodiscard]] bool needs_causes(const balance::DeviceReport& device) noexcept;

/// Health samples of a group's devices. It takes one when it is made, and one whenever causes() is asked about a slow
/// device. With GPUs the first one is taken on a thread of its own, because a driver may take seconds to answer.
/// causes() and the destructor wait for it. Not thread-safe.
class HealthLog {
 public:
  using Samples = std::vector<DeviceHealth>;
  /// One sample of each device, at one moment.
  using Sampler = std::function<Samples(std::span<const Device>)>;

  /// @param sampler null: health_of().
  explicit HealthLog(std::vector<Device> devices, Sampler sampler = {});

  /// Per device of the report: what may have slowed it down since the last call, or since the beginning. Empty if the
  /// device is not slow, or nothing was noticed. A second call without a step in between returns the same, because idle
  /// devices would dilute the figures.
  [[nodiscard]] std::vector<std::string> causes(const balance::BalanceReport& report);

 private:
  std::vector<Device> devices_;
  Sampler sampler_;
  std::future<Samples> first_;  // until causes() needs it
  Samples before_;
  Samples after_;
  std::int64_t steps_ = 0;  // how many had run when after_ was taken
};

}  // namespace paceline::internal
