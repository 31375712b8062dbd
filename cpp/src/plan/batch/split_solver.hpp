// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/plan/split.hpp>

#include "plan/batch/role_search.hpp"

namespace paceline::plan {

/// Solves a validated problem with at least one item; false if no split respects the limits.
[[nodiscard]] bool solve(const SplitProblem& problem, Split& split);

}  // namespace paceline::plan
