// SPDX-License-Identifier: Apache-2.0
#include "twins.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

#include "../reduction_twin.hpp"
#include "fake_cuda.hpp"
#include "stream_shelf.hpp"

namespace fake {
namespace {

using paceline::DType;
using paceline::cuda::ReductionArguments;

void reduce(const ReductionArguments& arguments, DType dtype) {
  const std::size_t bytes = arguments.count * paceline::size_of(dtype);
  const std::span<const void* const> inputs(arguments.inputs, static_cast<std::size_t>(arguments.input_count));
  for (const void* input : inputs) reads(input, bytes);
  writes(arguments.output, bytes);
  paceline::cuda::reduction_twin(arguments, dtype);
}

/// `to` and `from` float32 or a half type, the latter by the bits of its exponent and mantissa.
void convert(const paceline::cuda::ConversionArguments& arguments, int exponent_bits, int mantissa_bits, bool narrows) {
  const std::size_t wide = arguments.count * sizeof(float);
  const std::size_t half = arguments.count * sizeof(std::uint16_t);
  reads(arguments.from, narrows ? wide : half);
  writes(arguments.to, narrows ? half : wide);
  paceline::cuda::conversion_twin(arguments, exponent_bits, mantissa_bits, narrows);
}

template <DType dtype, class Kernel>
void set_twin(Kernel* kernel) {
  twin(kernel, [](const Launch&, const ReductionArguments& arguments) { reduce(arguments, dtype); });
}

}  // namespace

void set_twins() {
  using namespace paceline::cuda;
  set_release(&StreamShelf::clear_all);
  set_twin<DType::float32>(&paceline_reduce_float32);
  set_twin<DType::float64>(&paceline_reduce_float64);
  set_twin<DType::float16>(&paceline_reduce_float16);
  set_twin<DType::bfloat16>(&paceline_reduce_bfloat16);
  set_twin<DType::int32>(&paceline_reduce_int32);
  set_twin<DType::int64>(&paceline_reduce_int64);
  const auto set_conversions = [](auto* narrowing, auto* widening, int exponent_bits, int mantissa_bits) {
    twin(narrowing,
         [=](const Launch&, const ConversionArguments& a) { convert(a, exponent_bits, mantissa_bits, true); });
    twin(widening,
         [=](const Launch&, const ConversionArguments& a) { convert(a, exponent_bits, mantissa_bits, false); });
  };
  set_conversions(&paceline_to_float16, &paceline_from_float16, 5, 10);
  set_conversions(&paceline_to_bfloat16, &paceline_from_bfloat16, 8, 7);
}

}  // namespace fake
