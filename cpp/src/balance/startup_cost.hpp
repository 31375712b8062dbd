// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace paceline::balance {

/// How much later than the first device each device starts a step. A core that other programs keep busy lets its worker
/// in late.
///
/// The start is the median of the last steps in which the device had work. Until there are enough of them it is what
/// the options say. A device that came too late for any work counts as starting when the others finished: it started no
/// earlier, and that is enough to leave it out. The class is slow to believe that a device is late, and quick to
/// believe that it no longer is: after two successive starts in less than half of the median, earlier starts are
/// forgotten.
class StartupCost {
 public:
  /// `given`: seconds per device, until measured.
  explicit StartupCost(std::vector<double> given);

  /// One step: per device the seconds from the first start to its own, or none without work.
  void record(const std::vector<std::optional<double>>& seconds, double compute_seconds);

  [[nodiscard]] double seconds(std::size_t device) const { return devices_[device].seconds; }
  /// Starts that `seconds` rests on.
  [[nodiscard]] std::size_t samples(std::size_t device) const { return devices_[device].samples.size(); }
  /// What the options say.
  [[nodiscard]] double given(std::size_t device) const { return devices_[device].given; }
  /// Whether the device's last start was much earlier than usual. If the next one is, too, the device is no longer
  /// late.
  [[nodiscard]] bool doubtful(std::size_t device) const { return devices_[device].early; }

 private:
  struct Device {
    double given = 0.0;
    double seconds = 0.0;
    std::vector<double> samples{};  // oldest first
    bool early = false;             // whether the last sample was much earlier than those before
  };

  std::vector<Device> devices_;
};

}  // namespace paceline::balance
