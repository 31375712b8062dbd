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

}  // namespace paceline::cuda
