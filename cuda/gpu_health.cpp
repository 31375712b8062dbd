// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend's part of paceline/runtime/device_health.hpp.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "cuda_backend.hpp"
#include "nvml.hpp"
#include "nvml_deadline.hpp"

namespace paceline {
namespace cuda {
namespace {

std::optional<GpuAddress> address_of(int ordinal) {
  char bus_id[32] = {};
  if (cudaDeviceGetPCIBusId(bus_id, static_cast<int>(sizeof(bus_id)), ordinal) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::nullopt;
  }
  return GpuAddress{.name = fmt::format("cuda:{}", ordinal), .pci_bus_id = bus_id};
}

}  // namespace

std::optional<DeviceHealth> gpu_health(const Device& device) try {
  const auto gpu = address_of(device.index);
  if (!gpu) return std::nullopt;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) static_cast<void>(cudaGetLastError());
  std::vector<GpuAddress> others;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const auto other = ordinal == device.index ? std::nullopt : address_of(ordinal);
    if (other) others.push_back(*other);
  }
  const auto answer = std::make_shared<std::optional<DeviceHealth>>();
  const bool answered = NvmlDeadline::of_process().run([answer, gpu = *gpu, others = std::move(others)] {
    try {
      *answer = read_nvml(NvmlLibrary::of_process(), gpu, others);
    } catch (...) {  // no memory left
    }
  });
  return answered ? *answer : std::nullopt;
} catch (const std::bad_alloc&) {  // a device that does not tell is no error
  return std::nullopt;
}

HealthSource nvml_source() {
  NvmlDeadline& deadline = NvmlDeadline::of_process();
  const auto answer = std::make_shared<const NvmlLibrary*>();
  if (!deadline.run([answer] { *answer = &NvmlLibrary::of_process(); })) {
    return {.name = "NVML",
            .version = {},
            .path = {},
            .why_none = fmt::format("it has not answered within {:g} s: the driver may hang; nvidia-smi would tell",
                                    std::chrono::duration<double>(deadline.limit()).count())};
  }
  const NvmlLibrary& library = **answer;
  return {.name = "NVML", .version = library.version(), .path = library.path(), .why_none = library.why_none()};
}

}  // namespace cuda

std::vector<std::optional<DeviceHealth>> CudaBackend::health(std::span<const Device> devices) const {
  std::vector<std::optional<DeviceHealth>> health;
  for (const Device& device : devices) health.push_back(cuda::gpu_health(device));
  return health;
}
std::optional<HealthSource> CudaBackend::health_source() const { return cuda::nvml_source(); }

}  // namespace paceline
