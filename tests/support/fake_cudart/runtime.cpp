// SPDX-License-Identifier: Apache-2.0
//
// The entry points of the CUDA runtime that paceline calls.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "driver.hpp"
#include "machine.hpp"

using fake::machine;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

fake::Stream* as_stream(cudaStream_t stream) {
  auto* const found = machine().resolve(stream);
  if (found == nullptr) fake::misuse("the legacy default stream was used without saying so: cudaStreamLegacy");
  if (!machine().known(found)) fake::misuse("a stream that was destroyed was used");
  return found;
}

fake::Event* as_event(cudaEvent_t event) { return reinterpret_cast<fake::Event*>(event); }

cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body) {
  fake::Stream* const target = as_stream(stream);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  fake::Operation operation;
  operation.name = name;
  operation.body = std::move(body);
  machine().enqueue(target, std::move(operation));
  return cudaSuccess;
}

bool on_a_device(const void* data) {
  const fake::Allocation* const allocation = machine().find(data);
  return allocation != nullptr || machine().settings().foreign_memory;
}

}  // namespace

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
    case cudaDevAttrMultiProcessorCount:
      *value = machine().settings().multiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrClockRate:
      *value = 1'980'000;
      break;
    case cudaDevAttrHostNumaId:
      *value = 0;
      break;
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
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
  std::snprintf(properties->name, sizeof(properties->name), "Fake GPU %d", device);
  properties->totalGlobalMem = machine().settings().memory_bytes;
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
  // Pairs of neighbours, as where two GPUs share a switch.
  *can = device / 2 == peer / 2 && device != peer ? 1 : 0;
  return cudaSuccess;
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
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    default:
      return "cudaErrorOfTheFake";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  const std::lock_guard lock(machine().mutex);
  if (flags != cudaStreamNonBlocking) fake::misuse("a stream that waits for the legacy default stream was made");
  if (const cudaError_t error = machine().health(fake::current_device()); error != cudaSuccess) return fail(error);
  *stream = reinterpret_cast<cudaStream_t>(machine().make_stream(fake::current_device()));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  return machine().destroy(reinterpret_cast<fake::Stream*>(stream)) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const std::lock_guard lock(machine().mutex);
  fake::Stream* const target = as_stream(stream);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  machine().wait(target, as_event(event));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  fake::Stream* const target = as_stream(stream);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  return machine().query(target) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  ++machine().synchronize_calls;
  fake::Stream* const target = as_stream(stream);
  if (!machine().run_until([&] { return machine().query(target); })) fake::misuse("a synchronisation never ends");
  return machine().health(target->device);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  const std::lock_guard lock(machine().mutex);
  if (const cudaError_t error = machine().health(fake::current_device()); error != cudaSuccess) return fail(error);
  const bool timed = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(machine().make_event(fake::current_device(), timed));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(machine().mutex);
  return machine().destroy(as_event(event)) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  fake::Stream* const target = as_stream(stream);
  if (as_event(event)->device != target->device) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  machine().record(target, as_event(event));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(machine().mutex);
  if (const cudaError_t error = machine().health(as_event(event)->device); error != cudaSuccess) return fail(error);
  const auto recording = as_event(event)->latest;
  if (recording == nullptr) fake::misuse("an event that was never recorded was asked whether it is over");
  return machine().query(*recording) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::lock_guard lock(machine().mutex);
  ++machine().synchronize_calls;
  const auto recording = as_event(event)->latest;
  if (recording == nullptr) fake::misuse("an event that was never recorded was waited for");
  if (!machine().run_until([&] { return machine().query(*recording); })) {
    fake::misuse("a synchronisation never ends");
  }
  return machine().health(as_event(event)->device);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const std::lock_guard lock(machine().mutex);
  const fake::Event* const first = as_event(begin);
  const fake::Event* const second = as_event(end);
  if (!first->timed || !second->timed || first->device != second->device) return fail(cudaErrorInvalidResourceHandle);
  if (first->latest == nullptr || second->latest == nullptr) fake::misuse("time from an event that was never recorded");
  const auto seen = [](const fake::Recording& one) { return one.done && machine().queries >= one.visible; };
  if (!seen(*first->latest) || !seen(*second->latest)) return fail(cudaErrorNotReady);
  *milliseconds = static_cast<float>((second->latest->seconds - first->latest->seconds) * 1e3);
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  const std::lock_guard lock(machine().mutex);
  auto made = std::make_unique<fake::Pool>();
  made->device = properties->location.id;
  fake::Pool* const raw = made.get();
  machine().pools[raw] = std::move(made);
  *pool = reinterpret_cast<cudaMemPool_t>(raw);
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  const std::lock_guard lock(machine().mutex);
  return machine().pools.erase(reinterpret_cast<fake::Pool*>(pool)) == 1 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(machine().mutex);
  fake::Pool& target = *reinterpret_cast<fake::Pool*>(pool);
  if (attribute == cudaMemPoolAttrUsedMemHigh) {
    target.used_high = target.used;
  } else if (attribute == cudaMemPoolReuseAllowInternalDependencies || attribute == cudaMemPoolAttrReleaseThreshold) {
    target.attributes[attribute] = static_cast<int>(*static_cast<const std::uint8_t*>(value));
  } else {
    return fail(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(machine().mutex);
  const fake::Pool& target = *reinterpret_cast<fake::Pool*>(pool);
  auto* const bytes = static_cast<std::uint64_t*>(value);
  if (attribute == cudaMemPoolAttrUsedMemCurrent) {
    *bytes = target.used;
  } else if (attribute == cudaMemPoolAttrUsedMemHigh) {
    *bytes = target.used_high;
  } else {
    return fail(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  fake::Pool* const from = reinterpret_cast<fake::Pool*>(pool);
  if (const cudaError_t error = machine().health(from->device); error != cudaSuccess) return fail(error);
  fake::Allocation* const made = machine().allocate(from->device, bytes);
  if (made == nullptr) return fail(cudaErrorMemoryAllocation);
  made->pool = from;
  from->used += bytes;
  from->used_high = std::max(from->used_high, from->used);
  *data = made->data;
  // Whoever uses it must come after this operation.
  return enqueue(stream, "an allocation", [made] { fake::writes(made->data, made->bytes); });
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  fake::Allocation* const allocation = machine().find(data);
  if (allocation == nullptr || allocation->data != data) fake::misuse("memory was given back that was never taken");
  if (allocation->given_back) fake::misuse("memory was given back twice");
  allocation->given_back = true;
  return enqueue(stream, fake::kRelease, [allocation] {
    fake::writes(allocation->data, allocation->bytes);
    machine().free(allocation);
  });
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned int) {
  const std::lock_guard lock(machine().mutex);
  fake::Allocation* const made = machine().allocate(-1, bytes);
  if (made == nullptr) return fail(cudaErrorMemoryAllocation);
  *data = made->data;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  const std::lock_guard lock(machine().mutex);
  fake::Allocation* const allocation = machine().find(data);
  if (allocation == nullptr || allocation->device >= 0 || allocation->freed) {
    fake::misuse("pinned memory was given back that was not held");
  }
  // CUDA waits here for all work of the device.
  if (machine().works()) ++machine().synchronize_calls;
  machine().run_until([] { return false; });
  machine().free(allocation);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  return enqueue(stream, "a fill", [=] {
    fake::writes(data, bytes);
    std::memset(data, value, bytes);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  if (!on_a_device(to)) fake::misuse("an asynchronous copy into pageable memory, which holds the calling thread");
  if (on_a_device(from)) {
    return enqueue(stream, "a copy", [=] {
      fake::reads(from, bytes);
      fake::writes(to, bytes);
      std::memcpy(to, from, bytes);
    });
  }
  // From pageable memory: CUDA has taken the bytes when the call returns.
  const auto* const begin = static_cast<const std::byte*>(from);
  return enqueue(stream, "a copy", [to, taken = std::vector<std::byte>(begin, begin + bytes)] {
    fake::writes(to, taken.size());
    std::memcpy(to, taken.data(), taken.size());
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const std::lock_guard lock(machine().mutex);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  if (const fake::Allocation* const allocation = machine().find(data)) {
    attributes->type = allocation->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = allocation->device;
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) { return cudaSuccess; }

cudaError_t cudaMemcpyPeerAsync(void* to, int target, const void* from, int source, std::size_t bytes,
                                cudaStream_t stream) {
  for (const auto& [data, device] : {std::pair<const void*, int>{to, target}, {from, source}}) {
    const std::lock_guard lock(machine().mutex);
    const fake::Allocation* const allocation = machine().find(data);
    if (allocation == nullptr || allocation->device != device)
      fake::misuse("a copy between GPUs that names the wrong one");
  }
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int version,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = fake::driver_function(name, version);
  const bool found = *function != nullptr;
  if (result != nullptr) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return found ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}

}  // extern "C"
