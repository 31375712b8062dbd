// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

namespace paceline::cuda {

/// The driver's functions that the runtime has no name for, asked from the runtime: nothing links the driver.
struct Driver {
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) primary_context_retain = nullptr;
  decltype(&cuCtxPushCurrent) context_push = nullptr;
  decltype(&cuCtxPopCurrent) context_pop = nullptr;
};

/// @throws Unavailable if there is no driver, or one that lacks a function, naming it.
const Driver& driver();

/// The driver's green contexts: streams on some of a GPU's SMs. A table of its own, so that drivers without them do all
/// else.
struct GreenDriver {
  decltype(&cuDeviceGetDevResource) device_resource = nullptr;
  decltype(&cuDevSmResourceSplitByCount) split_by_count = nullptr;
  decltype(&cuDevResourceGenerateDesc) describe = nullptr;
  decltype(&cuGreenCtxCreate) create = nullptr;
  decltype(&cuGreenCtxDestroy) destroy = nullptr;
  decltype(&cuGreenCtxGetDevResource) context_resource = nullptr;
  decltype(&cuGreenCtxStreamCreate) make_stream = nullptr;
};

/// @throws Unavailable if the driver is older than CUDA 12.5, saying which one it is.
const GreenDriver& green_driver();

/// Whether CUDA_LAUNCH_BLOCKING makes every launch wait for its kernel.
[[nodiscard]] bool launches_block() noexcept;

}  // namespace paceline::cuda
