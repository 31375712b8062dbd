// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <paceline/runtime/gpu_facts.hpp>

namespace paceline::cuda {

/// The value of the attribute, or `otherwise` if the driver does not know the attribute.
[[nodiscard]] int attribute(cudaDeviceAttr which, int ordinal, int otherwise) noexcept;

/// The facts of the GPU with this ordinal, out of `gpu_count`.
[[nodiscard]] GpuFacts facts_of(int ordinal, int gpu_count);

}  // namespace paceline::cuda
