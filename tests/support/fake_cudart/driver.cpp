// SPDX-License-Identifier: Apache-2.0
//
// The driver functions that paceline asks cudaGetDriverEntryPointByVersion for.
#include "driver.hpp"

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "machine.hpp"

namespace fake {
namespace {

/// A primary context is its device's number plus one, so that none is null.
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

CUresult release(CUdevice) { return CUDA_SUCCESS; }

CUresult push(CUcontext context) {
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

struct Entry {
  const char* name;
  void* function;
};

const Entry kEntries[] = {
    {"cuDeviceGet", reinterpret_cast<void*>(&device_get)},
    {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
    {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&release)},
    {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
    {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
    {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
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

void* driver_function(const char* name) {
  if (!machine().settings().driver_present) return nullptr;
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, name) == 0) return entry.function;
  }
  return nullptr;
}

}  // namespace fake
