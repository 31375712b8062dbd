// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

namespace fake {

// Green contexts like those of drivers since CUDA 12.4. SMs are split into equal groups of Settings::sm_granularity or
// a multiple. Two contexts that share an SM end the program, and so does destroying a context before its streams or
// their work.
CUresult device_resource(CUdevice device, CUdevResource* resource, CUdevResourceType type);
CUresult split_by_count(CUdevResource* result, unsigned int* group_count, const CUdevResource* input,
                        CUdevResource* remaining, unsigned int flags, unsigned int least);
CUresult describe(CUdevResourceDesc* description, CUdevResource* resources, unsigned int count);
CUresult create_green_context(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device, unsigned int flags);
CUresult destroy_green_context(CUgreenCtx context);
CUresult green_context_resource(CUgreenCtx context, CUdevResource* resource, CUdevResourceType type);
CUresult create_green_stream(CUstream* stream, CUgreenCtx context, unsigned int flags, int priority);

}  // namespace fake
