// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/dtype.hpp>

#include <iterator>

#include <paceline/runtime/reduce_op.hpp>

namespace paceline {
namespace {

// In the order of DType.
struct TypeFacts {
  const char* name;
  std::size_t bytes;
};
constexpr TypeFacts kTypes[] = {{"float32", 4},  {"float64", 8}, {"float16", 2},
                                {"bfloat16", 2}, {"int32", 4},   {"int64", 8}};
static_assert(std::size(kTypes) == static_cast<std::size_t>(DType::int64) + 1);

// In the order of ReduceOp.
constexpr const char* kOperations[] = {"sum", "mean", "min", "max"};
static_assert(std::size(kOperations) == static_cast<std::size_t>(ReduceOp::max) + 1);

TypeFacts facts_of(DType dtype) noexcept {
  const auto index = static_cast<std::size_t>(dtype);
  return index < std::size(kTypes) ? kTypes[index] : TypeFacts{"unknown", 0};
}

}  // namespace

std::size_t size_of(DType dtype) noexcept { return facts_of(dtype).bytes; }

const char* name_of(DType dtype) noexcept { return facts_of(dtype).name; }

const char* name_of(ReduceOp op) noexcept {
  const auto index = static_cast<std::size_t>(op);
  return index < std::size(kOperations) ? kOperations[index] : "unknown";
}

}  // namespace paceline
