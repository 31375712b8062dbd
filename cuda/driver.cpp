// SPDX-License-Identifier: Apache-2.0
#include "driver.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include <paceline/error.hpp>

#include "error.hpp"

namespace paceline::cuda {
namespace {

// The version of the interface: the CUDA version that introduced the function. Newer drivers keep it.
constexpr unsigned int kOldestAbi = 12000;
constexpr unsigned int kGreenContexts = 12040;
constexpr unsigned int kGreenStreams = 12050;

template <class F>
void find(F& function, const char* name, unsigned int abi) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, abi, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) {
    static_cast<void>(cudaGetLastError());
    throw Unavailable(fmt::format("the CUDA driver has no {}: it is missing or older than CUDA {}.{}", name, abi / 1000,
                                  abi % 1000 / 10));
  }
  function = reinterpret_cast<F>(found);
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = [] {
    Driver driver;
    find(driver.device_get, "cuDeviceGet", kOldestAbi);
    find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain", kOldestAbi);
    find(driver.context_push, "cuCtxPushCurrent", kOldestAbi);
    find(driver.context_pop, "cuCtxPopCurrent", kOldestAbi);
    find(driver.pointer_attributes, "cuPointerGetAttributes", kOldestAbi);
    return driver;
  }();
  return loaded;
}

const GreenDriver& green_driver() {
  int version = 0;
  check(cudaDriverGetVersion(&version), "asking for the driver's version", 0);
  if (version < static_cast<int>(kGreenStreams)) {
    throw Unavailable(
        fmt::format("parts of a GPU need a driver for CUDA {}.{} or newer, and this one is for CUDA {}.{}",
                    kGreenStreams / 1000, kGreenStreams % 1000 / 10, version / 1000, version % 1000 / 10));
  }
  static const GreenDriver loaded = [] {
    GreenDriver driver;
    find(driver.device_resource, "cuDeviceGetDevResource", kGreenContexts);
    find(driver.split_by_count, "cuDevSmResourceSplitByCount", kGreenContexts);
    find(driver.describe, "cuDevResourceGenerateDesc", kGreenContexts);
    find(driver.create, "cuGreenCtxCreate", kGreenContexts);
    find(driver.destroy, "cuGreenCtxDestroy", kGreenContexts);
    find(driver.context_resource, "cuGreenCtxGetDevResource", kGreenContexts);
    find(driver.make_stream, "cuGreenCtxStreamCreate", kGreenStreams);
    return driver;
  }();
  return loaded;
}

bool launches_block() noexcept {
  const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

}  // namespace paceline::cuda
