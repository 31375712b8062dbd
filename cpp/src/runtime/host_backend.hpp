// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/runtime/backend.hpp>

namespace paceline {

/// CPU cores as synchronous devices in one memory space, with one pinned worker each.
class HostBackend final : public Backend {
 public:
  [[nodiscard]] DeviceKind kind() const noexcept override { return DeviceKind::host; }
  [[nodiscard]] std::string_view prefix() const noexcept override { return "host"; }
  [[nodiscard]] std::vector<Device> devices() const override;
  [[nodiscard]] Device find(std::string_view name) const override;
  void prepare_worker(const Device& device) const noexcept override;
  [[nodiscard]] bool asynchronous() const noexcept override { return false; }
  [[nodiscard]] std::vector<DeviceHealth> health(std::span<const Device> devices) const override;
};

}  // namespace paceline
