// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline::internal {

/// @throws InvalidArgument if a size is out of range, or corrections are asked for where they are impossible.
void check(const StepLoopOptions& options);

/// A balancer for the devices of the group. `proportional`: see balance::BalancerOptions.
[[nodiscard]] balance::Balancer make_balancer(const DeviceGroup& group, const StepLoopOptions& options,
                                              bool proportional);

/// StepOptions::run_ahead for the devices of the group.
[[nodiscard]] std::vector<std::int64_t> run_ahead_of(const DeviceGroup& group, const StepLoopOptions& options);

/// Keeps the sizes of micro-batches the same when shares move, for devices that compile, capture or choose algorithms
/// by size: with a fixed micro-batch, every share is a multiple of it, except for the rest of the batch.
[[nodiscard]] StepLoopOptions with_stable_shapes(StepLoopOptions options, bool asynchronous);

}  // namespace paceline::internal
