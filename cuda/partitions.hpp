// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string_view>
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

/// Whether each part counts as a memory space of its own, as a GPU does: PACELINE_PARTS_AS_GPUS=1 in the environment,
/// for tests on one GPU of what several GPUs do. Copies between such parts take the paths of copies between GPUs.
[[nodiscard]] bool parts_are_spaces();

/// The number of SM groups for each part, out of a GPU's `group_count` equal groups (largest remainders). Each part
/// gets its fraction, rounded down. Remaining groups go to the parts that lost most. Parts of equal fractions get the
/// same number: if there is not one more for each of them, the remaining groups stay unused.
///
/// Fractions are positive and sum to at most 1. `gpu` is for the message.
/// @throws InvalidArgument if a fraction is less than one group, with the smallest possible fraction.
[[nodiscard]] std::vector<int> deal_groups(std::span<const double> fractions, int group_count, std::string_view gpu);

}  // namespace paceline::cuda
