// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/dtype.hpp>

namespace paceline {

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float64:
    case DType::int64:
      return 8;
  }
  return 0;
}

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::float64:
      return "float64";
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
  }
  return "unknown";
}

}  // namespace paceline
