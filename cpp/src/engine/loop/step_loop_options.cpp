// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/step_loop_options.hpp"

#include <fmt/format.h>

#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

namespace paceline::internal {

balance::Balancer make_balancer(const DeviceGroup& group, const StepLoopOptions& options, bool proportional) {
  balance::BalancerOptions balancer;
  balancer.proportional = proportional;
  balancer.policy = options.balance;
  balancer.weights = options.weights;
  balancer.granularity = options.granularity;
  for (const Device& device : group.devices()) {
    balance::DeviceProfile profile;
    profile.name = device.name;
    profile.device_class = device.device_class;
    balancer.devices.push_back(std::move(profile));
  }
  return balance::Balancer(std::move(balancer));
}

std::vector<std::int64_t> run_ahead_of(const DeviceGroup& group, const StepLoopOptions& options) {
  if (!group.asynchronous()) return {};
  std::vector<std::int64_t> run_ahead;
  for (const Device& device : group.devices()) {
    run_ahead.push_back(backend_of(device).asynchronous() ? options.run_ahead : 0);
  }
  return run_ahead;
}

StepLoopOptions with_stable_shapes(StepLoopOptions options, bool asynchronous) {
  if (asynchronous && options.micro_batch > 0 && options.granularity == 1) options.granularity = options.micro_batch;
  return options;
}

void check(const StepLoopOptions& options) {
  if (options.micro_batch < 0) {
    throw InvalidArgument(
        fmt::format("micro_batch is {}; give a size of at least 1, or 0 to have it planned.", options.micro_batch));
  }
  if (options.least_items < 1) {
    throw InvalidArgument(fmt::format("least_items is {}; a micro-batch has at least one.", options.least_items));
  }
  if (options.corrections == true && (options.micro_batch > 0 || options.balance != Balance::automatic)) {
    throw InvalidArgument(
        "corrections are pieces of planned shares, of sizes that follow the speeds: they need balance 'auto', and a "
        "micro_batch of 0. With a micro-batch of fixed size, devices that are done early take over whole ones anyway.");
  }
}

}  // namespace paceline::internal
