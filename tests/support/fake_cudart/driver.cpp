// SPDX-License-Identifier: Apache-2.0
//
// The driver functions that paceline looks up with cudaGetDriverEntryPointByVersion.
#include "driver.hpp"

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "green_contexts.hpp"
#include "machine.hpp"

namespace fake {
namespace {

/// A primary context is its device's number plus one, so that no context is null.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device) + 1); }
int device_of(CUcontext context) { return static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1; }

thread_local std::vector<CUcontext> stack;

CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult retain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult push(CUcontext context) {
  const std::lock_guard lock(machine().mutex);
  const cudaError_t error = machine().health(device_of(context));
  if (machine().settings().push_fails && error != cudaSuccess) return static_cast<CUresult>(error);
  stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult pop(CUcontext* context) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult get_current(CUcontext* context) {
  *context = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}

/// For memory that the fake has not allocated, the answers of cudaMalloc's: PyTorch's allocator uses it.
CUresult pointer_attributes(unsigned int count, CUpointer_attribute* asked, void** answers, CUdeviceptr data) {
  const std::lock_guard lock(machine().mutex);
  const Allocation* const allocation = machine().find(reinterpret_cast<const void*>(data));
  Pool* const pool = allocation == nullptr ? nullptr : allocation->pool;
  if (const cudaError_t error = machine().health(current_device()); error != cudaSuccess) {
    return static_cast<CUresult>(error);
  }
  const bool from_malloc = allocation == nullptr ? machine().settings().foreign_memory
                                                 : pool == nullptr && allocation->device >= 0 && !allocation->mapped;
  for (unsigned int k = 0; k < count; ++k) {
    if (asked[k] == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) {
      *static_cast<Pool**>(answers[k]) = pool;
    } else if (asked[k] == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) {
      *static_cast<int*>(answers[k]) = from_malloc ? 1 : 0;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

struct Entry {
  const char* name;
  unsigned int since;  ///< the CUDA version of the first driver that has it
  void* function;
};

const Entry kEntries[] = {
    {"cuDeviceGet", 2000, reinterpret_cast<void*>(&device_get)},
    {"cuDevicePrimaryCtxRetain", 7000, reinterpret_cast<void*>(&retain)},
    {"cuCtxPushCurrent", 4000, reinterpret_cast<void*>(&push)},
    {"cuCtxPopCurrent", 4000, reinterpret_cast<void*>(&pop)},
    {"cuCtxGetCurrent", 4000, reinterpret_cast<void*>(&get_current)},
    {"cuPointerGetAttributes", 7000, reinterpret_cast<void*>(&pointer_attributes)},
    {"cuDeviceGetDevResource", 12040, reinterpret_cast<void*>(&device_resource)},
    {"cuDevSmResourceSplitByCount", 12040, reinterpret_cast<void*>(&split_by_count)},
    {"cuDevResourceGenerateDesc", 12040, reinterpret_cast<void*>(&describe)},
    {"cuGreenCtxCreate", 12040, reinterpret_cast<void*>(&create_green_context)},
    {"cuGreenCtxDestroy", 12040, reinterpret_cast<void*>(&destroy_green_context)},
    {"cuGreenCtxGetDevResource", 12040, reinterpret_cast<void*>(&green_context_resource)},
    {"cuGreenCtxStreamCreate", 12050, reinterpret_cast<void*>(&create_green_stream)},
};

}  // namespace

int current_device() { return stack.empty() ? 0 : device_of(stack.back()); }

void set_current_device(int device) {
  if (stack.empty()) {
    stack.push_back(context_of(device));
  } else {
    stack.back() = context_of(device);
  }
}

void forget_contexts() { stack.clear(); }

void use_context(const char* call) {
  if (!stack.empty()) return;
  machine().complain(std::string(call) + " on a thread without a context, which makes GPU 0's and leaves it there");
  stack.push_back(context_of(0));
}

void* driver_function(const char* name, unsigned int version) {
  const Settings& settings = machine().settings();
  if (!settings.driver_present) return nullptr;
  const auto driver_version = static_cast<unsigned int>(settings.driver_version);
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    // The driver returns nothing for a CUDA version older than the function.
    return entry.since <= std::min(version, driver_version) ? entry.function : nullptr;
  }
  return nullptr;
}

}  // namespace fake
