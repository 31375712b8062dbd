// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <paceline/runtime/gpu_facts.hpp>

namespace paceline::cuda {

/// What the driver says, or `otherwise` where it does not know the attribute.
[[nodiscard]] int attribute(cudaDeviceAttr which, int ordinal, int otherwise) noexcept;

/// Of the GPU with this ordinal, of `gpu_count`.
[[nodiscard]] GpuFacts facts_of(int ordinal, int gpu_count);

}  // namespace paceline::cuda
