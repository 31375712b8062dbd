// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

#include <paceline/device_id.hpp>

namespace paceline::balance {

/// How much later than the first device each one starts a step: a core that others keep busy lets its worker in late.
///
/// Measured: the median of the last steps that a device had work in, once there are enough, in place of what was told.
/// A device that came too late for anything counts as starting when the others finished: no earlier, which is all that
/// is known, and enough to leave it out. Slow to believe that a device is late, quick to believe that it no longer is:
/// two starts in a row in less than half of the median make a new beginning.
class StartupCost {
 public:
  /// `told`: seconds per device, until measured.
  explicit StartupCost(std::vector<double> told);

  /// One step: per device the seconds from the first start to its own, or none without work.
  void record(const std::vector<std::optional<double>>& seconds, double compute_seconds);

  [[nodiscard]] double seconds(DeviceId device) const { return devices_[device].seconds; }
  /// Starts that `seconds` rests on.
  [[nodiscard]] std::size_t samples(DeviceId device) const { return devices_[device].samples.size(); }
  /// What was told, as if nothing was measured.
  [[nodiscard]] double told(DeviceId device) const { return devices_[device].told; }
  /// True when the device's last start was much earlier than usual: alone so far, a new beginning if the next one
  /// agrees.
  [[nodiscard]] bool doubtful(DeviceId device) const { return devices_[device].early; }

 private:
  struct Device {
    double told = 0.0;
    double seconds = 0.0;
    std::deque<double> samples{};  // oldest first
    bool early = false;            // the last sample, against those before
  };

  std::vector<Device> devices_;
};

}  // namespace paceline::balance
