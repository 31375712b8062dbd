// SPDX-License-Identifier: Apache-2.0
#include <paceline/comm/reduce.hpp>

#include "comm/reduce_kernels.hpp"

namespace paceline {
namespace internal {
// Asks the processor once, at first use. ifunc and target_clones were rejected, because their resolvers run before the
// sanitizers' runtimes are ready.
std::span<const ReduceKernels* const> supported_reduce_kernels() noexcept {
#if defined(PACELINE_X86_KERNELS)
  static const ReduceKernels* const all[] = {&reduce_kernels_avx512, &reduce_kernels_avx2, &reduce_kernels_baseline};
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return std::span(all).subspan(avx512 ? 0 : avx2 ? 1 : 2);
#else
  static const ReduceKernels* const all[] = {&reduce_kernels_baseline};
  return all;
#endif
}
}  // namespace internal

void reduce_block(std::span<const void* const> inputs, void* output, std::size_t count, DType dtype,
                  ReduceOp op) noexcept {
  if (inputs.empty() || count == 0) return;
  const internal::ReduceKernels& kernels = *internal::supported_reduce_kernels().front();
  kernels.functions[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](inputs.data(), inputs.size(),
                                                                                   &output, 1, count);
}

const char* reduce_isa() noexcept { return internal::supported_reduce_kernels().front()->isa; }

}  // namespace paceline
