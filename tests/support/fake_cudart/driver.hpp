// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fake {

/// The calling thread's current device: that of the context on top of its stack, or 0.
int current_device();
void set_current_device(int device);

/// The driver's function of that name, in the interface of that CUDA version; null if it has none such.
void* driver_function(const char* name, unsigned int version);

}  // namespace fake
