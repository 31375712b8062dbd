// SPDX-License-Identifier: Apache-2.0
#include "twins.hpp"

#include <cstddef>
#include <span>

#include "../sum_twin.hpp"
#include "fake_cuda.hpp"
#include "stream_shelf.hpp"

namespace fake {
namespace {

using paceline::DType;
using paceline::cuda::SumArguments;

void sum(const SumArguments& arguments, DType dtype) {
  const std::size_t bytes = arguments.count * paceline::size_of(dtype);
  const std::span<const void* const> inputs(arguments.inputs, static_cast<std::size_t>(arguments.input_count));
  for (const void* input : inputs) reads(input, bytes);
  writes(arguments.output, bytes);
  paceline::cuda::sum_twin(arguments, dtype);
}

}  // namespace

void set_twins() {
  using namespace paceline::cuda;
  set_release(&StreamShelf::clear_all);
  twin(&paceline_sum_float32, [](const Launch&, const SumArguments& a) { sum(a, DType::float32); });
  twin(&paceline_sum_float64, [](const Launch&, const SumArguments& a) { sum(a, DType::float64); });
  twin(&paceline_sum_float16, [](const Launch&, const SumArguments& a) { sum(a, DType::float16); });
  twin(&paceline_sum_bfloat16, [](const Launch&, const SumArguments& a) { sum(a, DType::bfloat16); });
}

}  // namespace fake
