// SPDX-License-Identifier: Apache-2.0
//
// Entry points of the CUDA runtime for memory: pools, pinned memory, fills and copies.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "driver.hpp"
#include "entry_points.hpp"
#include "runtime/thread_place.hpp"

using fake::enqueue;
using fake::fail;
using fake::machine;
using fake::use_context;

namespace {

bool on_a_device(const void* data) {
  const fake::Allocation* const allocation = machine().find(data);
  return allocation != nullptr || machine().settings().foreign_memory;
}

cudaError_t before_copy() {
  std::function<cudaError_t()> call;
  {
    const std::lock_guard lock(machine().mutex);
    call = machine().before_copy;
  }
  const cudaError_t error = call == nullptr ? cudaSuccess : call();
  return error == cudaSuccess ? error : fail(error);
}

}  // namespace

extern "C" {

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  const std::lock_guard lock(machine().mutex);
  if (!machine().settings().pools) return fail(cudaErrorNotSupported);
  if (const cudaError_t error = machine().health(properties->location.id); error != cudaSuccess) return fail(error);
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

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void*) {
  const bool known =
      attribute == cudaMemPoolReuseAllowInternalDependencies || attribute == cudaMemPoolAttrReleaseThreshold;
  return known ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const std::lock_guard lock(machine().mutex);
  const fake::Pool& target = *reinterpret_cast<fake::Pool*>(pool);
  if (const cudaError_t error = machine().health(target.device); error != cudaSuccess) return fail(error);
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

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* access, std::size_t count) {
  const std::lock_guard lock(machine().mutex);
  fake::Pool& target = *reinterpret_cast<fake::Pool*>(pool);
  for (const cudaMemAccessDesc* each = access; each != access + count; ++each) {
    const int peer = each->location.id;
    if (peer != target.device && !machine().can_access(peer, target.device)) return fail(cudaErrorInvalidDevice);
    if (each->flags == cudaMemAccessFlagsProtNone) {
      target.peers.erase(peer);
    } else if (machine().refused_by_pools.contains(peer)) {
      return fail(cudaErrorInvalidDevice);
    } else {
      target.peers.insert(peer);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  fake::Pool& target = *reinterpret_cast<fake::Pool*>(pool);
  if (const cudaError_t error = machine().health(target.device); error != cudaSuccess) return fail(error);
  target.reserved = std::max(target.used, std::min(target.reserved, bytes));
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  fake::Pool* const from = reinterpret_cast<fake::Pool*>(pool);
  if (const cudaError_t error = machine().health(from->device); error != cudaSuccess) return fail(error);
  fake::Allocation* const made = machine().allocate(from->device, bytes);
  if (made == nullptr) return fail(cudaErrorMemoryAllocation);
  made->pool = from;
  from->used += bytes;
  from->used_high = std::max(from->used_high, from->used);
  from->reserved = std::max(from->reserved, from->used);
  *data = made->data;
  // Uses of the memory must come after this operation.
  return enqueue(stream, "an allocation", [made] { fake::writes(made->data, made->bytes); });
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  fake::Allocation* const allocation = machine().find(data);
  if (allocation == nullptr || allocation->data != data) fake::misuse("memory was given back that was never taken");
  if (allocation->given_back) fake::misuse("memory was given back twice");
  allocation->given_back = true;
  return enqueue(stream, fake::kRelease, [allocation] {
    fake::writes(allocation->data, allocation->bytes);
    machine().free(allocation);
  });
}

// Memory of the program's own: PyTorch's, for example.
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  fake::Allocation* const made = machine().allocate(fake::current_device(), bytes);
  if (made == nullptr) return fail(cudaErrorMemoryAllocation);
  *data = made->data;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  fake::Allocation* const allocation = machine().find(data);
  if (allocation == nullptr || allocation->data != data || allocation->pool != nullptr || allocation->freed) {
    fake::misuse("cudaFree of memory that cudaMalloc did not give");
  }
  machine().run_until([] { return false; });  // CUDA waits here for all work of the device
  machine().free(allocation);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned int) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  if (const cudaError_t error = machine().health(fake::current_device()); error != cudaSuccess) return fail(error);
  fake::Allocation* const made = machine().allocate(-1, bytes);
  if (made == nullptr) return fail(cudaErrorMemoryAllocation);
  machine().node_of_pinned_memory = paceline::internal::PreferredNode::current();
  *data = made->data;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
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
  use_context(__func__);
  return enqueue(stream, "a fill", [=] {
    fake::writes(data, bytes);
    std::memset(data, value, bytes);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (const cudaError_t error = before_copy(); error != cudaSuccess) return error;
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  if (!on_a_device(to)) fake::misuse("an asynchronous copy into pageable memory, which holds the calling thread");
  if (on_a_device(from)) {
    const fake::Allocation* const source = machine().find(from);
    const fake::Allocation* const target = machine().find(to);
    if (source != nullptr && target != nullptr) {
      machine().host_copies.downloads += source->device >= 0 && target->device < 0;
      machine().host_copies.uploads += source->device < 0 && target->device >= 0;
    }
    return enqueue(stream, fake::kCopy, [=] {
      fake::reads(from, bytes);
      fake::writes(to, bytes);
      machine().move(to, from, bytes);
    });
  }
  // For pageable memory, CUDA has read the bytes when the call returns.
  const auto* const begin = static_cast<const std::byte*>(from);
  return enqueue(stream, fake::kCopy, [to, taken = std::vector<std::byte>(begin, begin + bytes)] {
    fake::writes(to, taken.size());
    std::memcpy(to, taken.data(), taken.size());
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const std::lock_guard lock(machine().mutex);
  if (const cudaError_t error = machine().health(fake::current_device()); error != cudaSuccess) return fail(error);
  ++machine().pointer_queries;
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  if (const fake::Allocation* const allocation = machine().find(data)) {
    attributes->type = allocation->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = allocation->device;
  }
  return cudaSuccess;
}

// Copies between GPUs that the driver does not stage.
cudaError_t cudaMemcpyPeerAsync(void* to, int target, const void* from, int source, std::size_t bytes,
                                cudaStream_t stream) {
  if (const cudaError_t error = before_copy(); error != cudaSuccess) return error;
  for (const auto& [data, device] : {std::pair<const void*, int>{to, target}, {from, source}}) {
    const std::lock_guard lock(machine().mutex);
    const fake::Allocation* const allocation = machine().find(data);
    if (allocation == nullptr || allocation->device != device)
      fake::misuse("a copy between GPUs that names the wrong one");
  }
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  return enqueue(stream, fake::kCopy, [=] {
    fake::reads(from, bytes);
    fake::writes(to, bytes);
    machine().move(to, from, bytes);
    machine().bytes_between_gpus += bytes;
    const auto& pushes = machine().pushes;
    const bool pushed = machine().current_stream->device == source && pushes.contains({source, target});
    const auto& links = pushed ? pushes : machine().links;
    const auto link = links.find({source, target});
    if (link != links.end()) fake::takes(static_cast<double>(bytes) / link->second);
  });
}

}  // extern "C"
