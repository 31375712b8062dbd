// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

namespace paceline::cuda {

/// Functions of the driver that the runtime lacks. The pointers come from the runtime, so nothing links the driver.
struct Driver {
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) primary_context_retain = nullptr;
  decltype(&cuCtxPushCurrent) context_push = nullptr;
  decltype(&cuCtxPopCurrent) context_pop = nullptr;
  decltype(&cuPointerGetAttributes) pointer_attributes = nullptr;
};

/// @throws Unavailable if there is no driver, or if the driver lacks a function, which the message names.
const Driver& driver();

/// The driver's green contexts: streams on some of a GPU's SMs. They are a table of their own, because drivers without
/// them support everything else.
struct GreenDriver {
  decltype(&cuDeviceGetDevResource) device_resource = nullptr;
  decltype(&cuDevSmResourceSplitByCount) split_by_count = nullptr;
  decltype(&cuDevResourceGenerateDesc) describe = nullptr;
  decltype(&cuGreenCtxCreate) create = nullptr;
  decltype(&cuGreenCtxDestroy) destroy = nullptr;
  decltype(&cuGreenCtxGetDevResource) context_resource = nullptr;
  decltype(&cuGreenCtxStreamCreate) make_stream = nullptr;
};

/// @throws Unavailable with the version of the driver, if it is older than CUDA 12.5.
const GreenDriver& green_driver();

/// Whether CUDA_LAUNCH_BLOCKING makes every launch wait for its kernel.
[[nodiscard]] bool launches_block() noexcept;

}  // namespace paceline::cuda
