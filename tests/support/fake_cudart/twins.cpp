// SPDX-License-Identifier: Apache-2.0
#include "twins.hpp"

#include <cstddef>
#include <span>

#include <paceline/comm/reduce.hpp>

#include "fake_cuda.hpp"
#include "sum.hpp"

namespace fake {
namespace {

using paceline::DType;
using paceline::cuda::SumArguments;

template <class T>
void scale(void* data, std::size_t count, double by) {
  for (std::size_t i = 0; i < count; ++i) static_cast<T*>(data)[i] *= static_cast<T>(by);
}

void sum(const SumArguments& arguments, DType dtype) {
  const std::size_t bytes = arguments.count * paceline::size_of(dtype);
  const std::span<const void* const> inputs(arguments.inputs, static_cast<std::size_t>(arguments.input_count));
  for (const void* input : inputs) reads(input, bytes);
  writes(arguments.output, bytes);
  paceline::reduce_block(inputs, arguments.output, arguments.count, dtype, paceline::ReduceOp::sum);
  if (arguments.scale == 1.0) return;
  if (dtype == DType::float32) scale<float>(arguments.output, arguments.count, arguments.scale);
  if (dtype == DType::float64) scale<double>(arguments.output, arguments.count, arguments.scale);
}

}  // namespace

void set_twins() {
  using namespace paceline::cuda;
  twin(&paceline_sum_float32, [](const Launch&, const SumArguments& a) { sum(a, DType::float32); });
  twin(&paceline_sum_float64, [](const Launch&, const SumArguments& a) { sum(a, DType::float64); });
  twin(&paceline_sum_float16, [](const Launch&, const SumArguments& a) { sum(a, DType::float16); });
  twin(&paceline_sum_bfloat16, [](const Launch&, const SumArguments& a) { sum(a, DType::bfloat16); });
}

}  // namespace fake
