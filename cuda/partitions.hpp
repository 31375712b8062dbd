// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include <paceline/runtime/device.hpp>

namespace paceline::cuda {

class GreenContext;

// The splits of this process, at most one per GPU. paceline::partition() has their contract.

/// The parts of `gpu`. Splits the GPU unless this split exists.
[[nodiscard]] std::vector<Device> split(const Device& gpu, std::span<const double> fractions);
/// The current parts of `gpu`; empty without a split.
[[nodiscard]] std::vector<Device> parts_of(const Device& gpu);
/// The context of a part. Its owners keep the split alive.
/// @throws InvalidArgument if the split of this part has ended.
[[nodiscard]] std::shared_ptr<GreenContext> context_of(const Device& part);
void end_split(const Device& gpu, std::chrono::nanoseconds timeout);

}  // namespace paceline::cuda
