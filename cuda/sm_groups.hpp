// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace paceline::cuda {

/// The number of SM groups for each part, out of a GPU's `group_count` equal groups (largest remainders). Each part
/// gets its fraction, rounded down. Remaining groups go to the parts that lost most. Parts of equal fractions get the
/// same number: if there is not one more for each of them, the remaining groups stay unused.
///
/// Fractions are positive and sum to at most 1. `gpu` is for the message.
/// @throws InvalidArgument if a fraction is less than one group, with the smallest possible fraction.
[[nodiscard]] std::vector<int> deal_groups(std::span<const double> fractions, int group_count, std::string_view gpu);

}  // namespace paceline::cuda
