// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline::engine {

/// @throws InvalidArgument for numbers that are no sizes, and for corrections where there can be none.
void check(const StepLoopOptions& options);

/// A balancer for the devices of the group. `proportional`: as balance::BalancerOptions has it.
[[nodiscard]] balance::Balancer make_balancer(const DeviceGroup& group, const StepLoopOptions& options,
                                              bool proportional);

/// Of each device; none where all are done when the call returns.
[[nodiscard]] std::vector<std::int64_t> run_ahead_of(const DeviceGroup& group, const StepLoopOptions& options);

/// On devices that choose algorithms, compile or capture by size, moving shares shall bring no new sizes: with a fixed
/// micro-batch every share is made of whole ones, but for what is left of the batch.
[[nodiscard]] StepLoopOptions with_stable_shapes(StepLoopOptions options, bool asynchronous);

}  // namespace paceline::engine
