// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fake {

/// The calling thread's current device: the device of the context on top of its stack, or 0.
int current_device();
void set_current_device(int device);
/// Makes the calling thread look new: it has no context.
void forget_contexts();

/// What the runtime does first in most calls: a thread without a context gets GPU 0's and keeps it. Reported as a
/// problem, because the thread may be the program's own and have nothing to do with GPU 0. Requires the machine's lock.
void use_context(const char* call);

/// The driver's function with that name, in the interface of that CUDA version; null if there is none.
void* driver_function(const char* name, unsigned int version);

}  // namespace fake
