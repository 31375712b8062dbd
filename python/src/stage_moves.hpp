// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/balance/stage_balancer.hpp>

namespace paceline::python {

inline const char* name_of(balance::StageMove::Kind kind) {
  switch (kind) {
    case balance::StageMove::Kind::depth:
      return "depth";
    case balance::StageMove::Kind::memory:
      return "memory";
    case balance::StageMove::Kind::devices:
      return "devices";
    case balance::StageMove::Kind::cuts:
      break;
  }
  return "cuts";
}

}  // namespace paceline::python
