// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace paceline::cuda {

/// How many of a GPU's `group_count` equal groups of SMs each part gets: its fraction of them rounded down, then one
/// more where most was lost, as long as groups are left (largest remainders). Parts of equal fractions get equally
/// many: where there is not one more for each of them, the rest stays unused.
///
/// Fractions are positive and sum to at most 1. `gpu` is for the message.
/// @throws InvalidArgument if a fraction is less than one group, saying the smallest that is possible.
[[nodiscard]] std::vector<int> deal_groups(std::span<const double> fractions, int group_count, std::string_view gpu);

}  // namespace paceline::cuda
