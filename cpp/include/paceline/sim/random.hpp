// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/plan/random.hpp>

namespace paceline::sim {

using plan::Random;

}  // namespace paceline::sim
