// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include <paceline/runtime/device.hpp>

namespace paceline::cuda {

class GreenContext;

// The splits of this process: at most one of each GPU. What they promise is said at paceline::partition().

/// The parts of `gpu`, made now unless this split is there.
[[nodiscard]] std::vector<Device> split(const Device& gpu, std::span<const double> fractions);
/// The parts that `gpu` has now; none without a split.
[[nodiscard]] std::vector<Device> parts_of(const Device& gpu);
/// The context behind a part. Who holds it keeps the split.
/// @throws InvalidArgument if the split that the part is of is no more.
[[nodiscard]] std::shared_ptr<GreenContext> context_of(const Device& part);
void end_split(const Device& gpu, std::chrono::nanoseconds timeout);

}  // namespace paceline::cuda
