// SPDX-License-Identifier: Apache-2.0
#include "driver.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <paceline/error.hpp>

#include "error.hpp"
#include "toolkit.hpp"

namespace paceline::cuda {
namespace {

constexpr unsigned int kOldestAbi = 12000;  // of the functions below; newer drivers keep it

template <class F>
void find(F& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = find_driver_function(name, &found, kOldestAbi, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) {
    static_cast<void>(cudaGetLastError());
    throw Unavailable(fmt::format("the CUDA driver has no {}: it is missing or older than CUDA 12.0", name));
  }
  function = reinterpret_cast<F>(found);
}

Driver load() {
  Driver driver;
  find(driver.device_get, "cuDeviceGet");
  find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  find(driver.context_push, "cuCtxPushCurrent");
  find(driver.context_pop, "cuCtxPopCurrent");
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

}  // namespace paceline::cuda
