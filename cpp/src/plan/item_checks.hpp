// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "item_problem.hpp"

namespace paceline::plan::detail {

/// @throws InvalidArgument for numbers that make no sense.
void validate_items(std::span<const double> costs, std::span<const LoadModel> models, const ItemOptions& options);

/// @throws InvalidArgument for caps whose sums, or which for a single item, leave too little room. An infinite lower
/// bound says that caps on count and cost do so together.
void require_room(const ItemProblem& problem, const ItemOptions& options, double lower_bound);

/// @throws InvalidArgument always: `proven` if every split was tried.
[[noreturn]] void throw_not_found(const ItemProblem& problem, const ItemOptions& options, bool proven);

}  // namespace paceline::plan::detail
