// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <paceline/error.hpp>

#include "plan/stages/stage_search.hpp"

namespace paceline::plan {

void refuse_memory(const StageCosts& costs, const StageOptions& options) {
  (void)costs;
  (void)options;
  throw OutOfMemory("no plan fits");
}

}  // namespace paceline::plan
