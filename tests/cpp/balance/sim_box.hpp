// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/sim/box.hpp>

namespace paceline::balance::testing {

/// The balancer's options for the devices of a box.
inline BalancerOptions options_for(const sim::BoxOptions& box) {
  BalancerOptions options;
  for (const sim::SimDevice& device : box.devices)
    options.devices.push_back({device.name, device.device_class, device.limits});
  return options;
}

/// Devices of these speeds that take 4 ms plus 0.1 ms per item.
inline sim::BoxOptions box_of(const std::vector<double>& speeds, double noise = 0.0, double first_run_seconds = 0.0) {
  sim::BoxOptions box{.noise = noise, .seed = 3};
  for (const double speed : speeds) {
    box.devices.push_back(
        {.name = "sim:" + std::to_string(box.devices.size()), .speed = speed, .first_run_seconds = first_run_seconds});
  }
  return box;
}

}  // namespace paceline::balance::testing
