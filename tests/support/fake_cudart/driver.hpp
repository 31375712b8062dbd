// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fake {

/// The calling thread's current device: that of the context on top of its stack, or 0.
int current_device();
void set_current_device(int device);
/// The calling thread has no context any more, as one that has just begun.
void forget_contexts();

/// What the runtime does first in most calls: a thread without a context gets GPU 0's, and keeps it. A problem, for the
/// thread may be the program's own, and want nothing of GPU 0. Under the machine's lock.
void use_context(const char* call);

/// The driver's function of that name, in the interface of that CUDA version; null if it has none such.
void* driver_function(const char* name, unsigned int version);

}  // namespace fake
