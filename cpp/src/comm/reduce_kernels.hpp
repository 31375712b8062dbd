// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>

namespace paceline::internal {

inline constexpr std::size_t kDTypeCount = 6;
inline constexpr std::size_t kReduceOpCount = 4;

using ReduceFunction = void (*)(const void* const* inputs, std::size_t input_count, void* const* outputs,
                                std::size_t output_count, std::size_t count);

/// One compilation of the kernels for one instruction set: functions[dtype][op].
struct ReduceKernels {
  const char* isa;
  ReduceFunction functions[kDTypeCount][kReduceOpCount];
};

extern const ReduceKernels reduce_kernels_baseline;
extern const ReduceKernels reduce_kernels_avx2;
extern const ReduceKernels reduce_kernels_avx512;

/// The compilations that this processor can run, best first. Exported so that tests can compare them.
[[nodiscard]] PACELINE_API std::span<const ReduceKernels* const> supported_reduce_kernels() noexcept;

}  // namespace paceline::internal
