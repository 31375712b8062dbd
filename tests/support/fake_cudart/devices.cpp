// SPDX-License-Identifier: Apache-2.0
//
// Entry points of the CUDA runtime for devices, errors, kernels and the driver.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "driver.hpp"
#include "entry_points.hpp"

using fake::fail;
using fake::machine;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t fake::fail(cudaError_t error) {
  last_error = error;
  return error;
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  const std::lock_guard lock(machine().mutex);
  *count = 0;
  if (!machine().settings().driver_present) return fail(cudaErrorInsufficientDriver);
  if (machine().settings().device_count == 0) return fail(cudaErrorNoDevice);
  *count = machine().settings().device_count;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const std::lock_guard lock(machine().mutex);
  *version = machine().settings().driver_present ? machine().settings().driver_version : 0;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const std::lock_guard lock(machine().mutex);
  if (device < 0 || device >= machine().settings().device_count) return fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrClockRate:
      *value = 1'980'000;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = machine().settings().multiprocessors;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = machine().settings().pools ? 1 : 0;
      break;
    case cudaDevAttrHostNumaId:
      *value = 0;
      break;
    default:
      fake::misuse("cudaDeviceGetAttribute: unknown attribute " + std::to_string(attribute));
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const std::lock_guard lock(machine().mutex);
  if (device < 0 || device >= machine().settings().device_count) return fail(cudaErrorInvalidDevice);
  *properties = {};
  const std::string& model = machine().settings().model;
  const std::string name = model.empty() ? "Fake GPU " + std::to_string(device) : model;
  std::snprintf(properties->name, sizeof(properties->name), "%s", name.c_str());
  properties->totalGlobalMem = machine().memory_bytes(device);
  properties->multiProcessorCount = machine().settings().multiprocessors;
  properties->major = 9;
  properties->asyncEngineCount = 3;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  const std::lock_guard lock(machine().mutex);
  if (device < 0 || device >= machine().settings().device_count) return fail(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = fake::current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const std::lock_guard lock(machine().mutex);
  if (device < 0 || device >= machine().settings().device_count) return fail(cudaErrorInvalidDevice);
  fake::set_current_device(device);
  return machine().health(device);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const std::lock_guard lock(machine().mutex);
  if (std::max(device, peer) >= machine().settings().device_count) return fail(cudaErrorInvalidDevice);
  *can = machine().can_access(device, peer) ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr attribute, int source, int target) {
  const std::lock_guard lock(machine().mutex);
  if (attribute != cudaDevP2PAttrNativeAtomicSupported || source == target) return fail(cudaErrorInvalidValue);
  if (std::max(source, target) >= machine().settings().device_count) return fail(cudaErrorInvalidDevice);
  *value = machine().settings().nvlink && machine().can_access(source, target) ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  const std::lock_guard lock(machine().mutex);
  fake::use_context(__func__);
  const int device = fake::current_device();
  if (const cudaError_t error = machine().health(device); error != cudaSuccess) return fail(error);
  if (const cudaError_t error = machine().health(peer); error != cudaSuccess) return fail(error);
  if (flags != 0) return fail(cudaErrorInvalidValue);
  if (!machine().can_access(device, peer)) return fail(cudaErrorPeerAccessUnsupported);
  return machine().peer_access.emplace(device, peer).second ? cudaSuccess : fail(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  const std::lock_guard lock(machine().mutex);
  fake::use_context(__func__);
  const int device = fake::current_device();
  if (const cudaError_t error = machine().health(device); error != cudaSuccess) return fail(error);
  return machine().peer_access.erase({device, peer}) == 1 ? cudaSuccess : fail(cudaErrorPeerAccessNotEnabled);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorECCUncorrectable:
      return "cudaErrorECCUncorrectable";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    default:
      return "cudaErrorOfTheFake";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  const std::lock_guard lock(machine().mutex);
  fake::use_context(__func__);
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  const std::lock_guard lock(machine().mutex);
  fake::use_context(__func__);
  *free = *total = machine().memory_bytes(fake::current_device());
  const cudaError_t error = machine().health(fake::current_device());
  return error == cudaSuccess ? error : fail(error);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int version,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = fake::driver_function(name, version);
  const bool found = *function != nullptr;
  if (result != nullptr) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return found ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}

}  // extern "C"
