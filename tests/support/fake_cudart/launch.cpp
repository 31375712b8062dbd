// SPDX-License-Identifier: Apache-2.0
//
// What nvcc's host code calls to register and launch kernels. Launches run the kernels' host twins.
#include <cuda_runtime_api.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "driver.hpp"
#include "entry_points.hpp"
#include "machine.hpp"

namespace fake {
namespace {

struct Kernels {
  std::map<const void*, std::string> names;  // by the address of the kernel's host function
  std::map<const void*, Bind> twins;
  std::set<std::pair<const void*, int>> loaded;  // kernel and device, since the boot
};

Kernels& kernels() {
  static Kernels* const all = new Kernels;  // leaked, because static constructors register before main
  return *all;
}

/// Lazy loading: the first launch of a kernel on a device loads it, which waits until the device has nothing to do.
/// Tests' own kernels, which nvcc has not compiled, count as loaded.
void load_at_launch(const void* kernel, int device) {
  if (kernels().names[kernel].empty() || !kernels().loaded.emplace(kernel, device).second) return;
  if (!machine().finish_all(device)) {
    machine().complain("the first launch of " + kernels().names[kernel] +
                       " waits for work of the device that waits for the calling thread: a deadlock");
  }
}

cudaError_t load(const void* kernel) {
  use_context("a kernel's loading");
  kernels().loaded.emplace(kernel, current_device());
  return machine().health(current_device());
}

cudaError_t launch(const void* kernel, const Launch& how, void** arguments) {
  const std::lock_guard lock(machine().mutex);
  use_context("a kernel's launch");
  Stream* const stream = machine().resolve(how.stream);
  if (stream == nullptr) misuse("a kernel was launched on the legacy default stream");
  if (!machine().known(stream)) misuse("a kernel was launched on a stream that was destroyed");
  if (current_device() != stream->device) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = machine().health(stream->device); error != cudaSuccess) return error;
  const auto twin = kernels().twins.find(kernel);
  if (twin == kernels().twins.end()) misuse("a kernel without a twin was launched: " + kernels().names[kernel]);
  load_at_launch(kernel, stream->device);
  Operation operation;
  const std::string& name = kernels().names[kernel];
  operation.name = name.empty() ? "a kernel" : name.c_str();
  operation.body = twin->second(how, arguments);
  machine().enqueue(stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace

void set_twin(const void* kernel, Bind bind) {
  const std::lock_guard lock(machine().mutex);
  kernels().twins[kernel] = std::move(bind);
}

void forget_loaded_kernels() { kernels().loaded.clear(); }

}  // namespace fake

extern "C" {

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const std::lock_guard lock(fake::machine().mutex);
  *attributes = {};
  const cudaError_t error = fake::load(kernel);
  return error == cudaSuccess ? error : fake::fail(error);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int, std::size_t) {
  const std::lock_guard lock(fake::machine().mutex);
  *blocks = 4;
  const cudaError_t error = fake::load(kernel);
  return error == cudaSuccess ? error : fake::fail(error);
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  fake::kernels().names[host] = name;
}

// For launches by <<<>>>, which paceline does not use.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) {
  fake::misuse("a kernel was launched by <<<>>>");
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                               cudaStream_t stream) {
  return fake::launch(reinterpret_cast<const void*>(kernel), {grid, block, shared_bytes, stream}, arguments);
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                             cudaStream_t stream) {
  return fake::launch(kernel, {grid, block, shared_bytes, stream}, arguments);
}

}  // extern "C"
