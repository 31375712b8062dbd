// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/reduce_op.hpp>

namespace paceline {

const char* name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::mean:
      return "mean";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
  }
  return "unknown";
}

}  // namespace paceline
