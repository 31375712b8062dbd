// SPDX-License-Identifier: Apache-2.0
#include "cuda_backend.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/host_topology.hpp>

#include "cuda_device.hpp"
#include "device_guard.hpp"
#include "driver.hpp"
#include "error.hpp"
#include "green_context.hpp"
#include "nvml.hpp"
#include "partitions.hpp"
#include "runtime/builtin_backends.hpp"
#include "runtime/text_file.hpp"
#include "runtime/thread_place.hpp"

namespace paceline {
namespace {

constexpr const char* kOneSlice =
    "CUDA shows a process one slice and no other GPU. To use several, start a process for each slice, with "
    "CUDA_VISIBLE_DEVICES set to its MIG-... name, and join the processes as ranks: DataParallel(group=)";

/// Whether the process sees a slice of a GPU in MIG mode. CUDA names it "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
bool is_slice(std::string_view model) { return model.find(" MIG ") != std::string_view::npos; }

/// Whether the environment shows slices: "MIG-..." names one.
bool wants_slices() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr && std::string_view(visible).find("MIG") != std::string_view::npos;
}

std::string slice_text(std::string_view model) { return is_slice(model) || wants_slices() ? kOneSlice : ""; }

struct Count {
  int devices = 0;
  std::string why_none;
};

Count count_devices() {
  Count count;
  const cudaError_t error = cudaGetDeviceCount(&count.devices);
  if (error == cudaSuccess && count.devices > 0) return count;
  static_cast<void>(cudaGetLastError());
  count.devices = 0;
  int version = 0;
  const bool has_driver = cudaDriverGetVersion(&version) == cudaSuccess && version > 0;
  if (!has_driver) {
    count.why_none = "no NVIDIA driver is loaded";
  } else if (error == cudaErrorInsufficientDriver) {
    count.why_none =
        fmt::format("the driver is for CUDA {}.{}, older than the CUDA {}.{} that this build needs", version / 1000,
                    version % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  } else if (error == cudaErrorNoDevice || error == cudaSuccess) {
    count.why_none = "the driver shows no GPU (is CUDA_VISIBLE_DEVICES set?)";
    if (wants_slices()) {
      count.why_none =
          fmt::format("the driver shows no GPU, though CUDA_VISIBLE_DEVICES is {} (nvidia-smi -L lists slices). {}",
                      std::getenv("CUDA_VISIBLE_DEVICES"), kOneSlice);
    }
  } else {
    count.why_none = fmt::format("the driver answers: {}", cuda::text_of(error));
  }
  return count;
}

/// The cores of the GPU's NUMA node that this process may use. Empty, which stands for all cores, if there are
/// none.
std::vector<int> near_cores(const HostTopology& topology, int node) {
  std::vector<int> near;
  for (const HostCore& core : topology.cores) {
    if (node >= 0 && core.numa_node == node) near.push_back(core.index);
  }
  return near;
}

Device describe(const HostTopology& topology, int ordinal) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, ordinal), "asking for its properties", ordinal);
  Device device;
  device.kind = DeviceKind::cuda;
  device.index = ordinal;
  device.name = fmt::format("cuda:{}", ordinal);
  device.memory_space = device.name;
  device.device_class = fmt::format("{}, {} SMs", properties.name, properties.multiProcessorCount);
  device.numa_node = cuda::attribute(cudaDevAttrHostNumaId, ordinal, -1);
  device.cores = near_cores(topology, device.numa_node);
  device.sm_count = properties.multiProcessorCount;
  return device;
}

Device find_part(const Device& gpu, std::string_view name, std::string_view digits) {
  const std::vector<Device> parts = cuda::parts_of(gpu);
  if (parts.empty()) {
    throw InvalidArgument(
        fmt::format("there is no '{0}': {1} has not been split. Call partition(\"{1}\", ...) first, "
                    "with the fractions that its parts shall have",
                    name, gpu.name));
  }
  const std::optional<std::int32_t> part = internal::parse_index(digits);
  if (part && static_cast<std::size_t>(*part) < parts.size()) return parts[static_cast<std::size_t>(*part)];
  throw InvalidArgument(fmt::format("there is no '{}': the parts of {} are called {} to {}", name, gpu.name,
                                    parts.front().name, parts.back().name));
}

void require_whole(const Device& device, const char* call) {
  if (device.part < 0) return;
  throw InvalidArgument(
      fmt::format("{}: {} is a part of a GPU. Name the GPU itself: cuda:{}.", call, device.name, device.index),
      device.name);
}

CudaVersion version_of(int number) { return {number / 1000, number % 1000 / 10}; }

std::vector<std::string> peers_of(int ordinal, int gpu_count) {
  std::vector<std::string> peers;
  for (int other = 0; other < gpu_count; ++other) {
    if (other == ordinal) continue;
    int can = 0;
    cuda::check(cudaDeviceCanAccessPeer(&can, ordinal, other), "asking for its peers", ordinal);
    if (can != 0) peers.push_back(fmt::format("cuda:{}", other));
  }
  return peers;
}

void add_partitions(GpuFacts& facts, int ordinal) {
  try {
    const std::vector<CUdevResource> groups = cuda::split_sms(ordinal);
    facts.most_partitions = static_cast<int>(groups.size());
    if (!groups.empty()) facts.partition_sm_count = static_cast<int>(groups.front().sm.smCount);
    if (groups.empty()) facts.why_no_partitions = "CUDA makes no groups of its SMs";
  } catch (const Error& error) {  // this too is a fact about the GPU; the others follow
    facts.why_no_partitions = error.what();
  }
}

/// The facts of the GPU with this ordinal, out of `gpu_count`.
GpuFacts facts_of(int ordinal, int gpu_count) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, ordinal), "asking for its properties", ordinal);
  char pci_bus_id[32] = {};
  cuda::check(cudaDeviceGetPCIBusId(pci_bus_id, sizeof(pci_bus_id), ordinal), "asking for its PCI address", ordinal);
  int driver = 0;
  int runtime = 0;
  cuda::check(cudaDriverGetVersion(&driver), "asking for the driver's version", ordinal);
  cuda::check(cudaRuntimeGetVersion(&runtime), "asking for the runtime's version", ordinal);

  GpuFacts facts;
  facts.device = fmt::format("cuda:{}", ordinal);
  facts.model = properties.name;
  facts.pci_bus_id = pci_bus_id;
  facts.numa_node = cuda::attribute(cudaDevAttrHostNumaId, ordinal, -1);
  facts.compute_capability = {properties.major, properties.minor};
  facts.sm_count = properties.multiProcessorCount;
  facts.peak_clock_khz = cuda::attribute(cudaDevAttrClockRate, ordinal, 0);  // CUDA 13 removed it from the properties
  facts.memory_bytes = properties.totalGlobalMem;
  facts.copy_engine_count = properties.asyncEngineCount;
  facts.peers = peers_of(ordinal, gpu_count);
  facts.mig = slice_text(properties.name);
  facts.driver = version_of(driver);
  facts.runtime = version_of(runtime);
  add_partitions(facts, ordinal);
  return facts;
}

}  // namespace

const Backend* internal::gpu_backend() noexcept {
  static const CudaBackend backend;
  return &backend;
}

std::string internal::why_no_gpu(std::string_view) { return {}; }

std::vector<Device> CudaBackend::devices() const {
  std::vector<Device> found;
  const int count = count_devices().devices;
  if (count == 0) return found;
  const HostTopology topology = read_host_topology();
  for (int ordinal = 0; ordinal < count; ++ordinal) found.push_back(describe(topology, ordinal));
  return found;
}

std::string CudaBackend::why_none() const { return count_devices().why_none; }

Device CudaBackend::find(std::string_view name) const {
  const Count count = count_devices();
  if (count.devices == 0) throw InvalidArgument(fmt::format("there is no device '{}': {}", name, count.why_none));
  const std::string_view after_prefix = name.substr(prefix().size() + 1);
  const std::size_t slash = after_prefix.find('/');
  const std::optional<std::int32_t> index = internal::parse_index(after_prefix.substr(0, slash));
  if (!index) {
    throw InvalidArgument(fmt::format("'{}' is not the name of a device: GPUs are called cuda:0, cuda:1, ...", name));
  }
  if (*index >= count.devices) {
    std::string there =
        count.devices == 1 ? "the only GPU is cuda:0" : fmt::format("the last GPU is cuda:{}", count.devices - 1);
    if (const std::string mig = slice_text(describe(read_host_topology(), 0).device_class); !mig.empty()) {
      there += ", a MIG slice. " + mig;
    }
    throw InvalidArgument(fmt::format("there is no device '{}': {}", name, there));
  }
  const Device gpu = describe(read_host_topology(), *index);
  return slash == std::string_view::npos ? gpu : find_part(gpu, name, after_prefix.substr(slash + 1));
}

// Best effort: without it everything works, but from more distant cores.
void CudaBackend::prepare_worker(const Device& device) const noexcept {
  internal::pin_this_thread(device.cores);
  // The thread is ours, so its current device may change. An error here comes again in a call that can report it.
  static_cast<void>(cudaSetDevice(device.index));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

std::string CudaBackend::why_in_turns() const {
  return cuda::launches_block() ? "CUDA_LAUNCH_BLOCKING is set, so every launch waits for its kernel" : "";
}

std::unique_ptr<AsyncDevice> CudaBackend::open(const Device& device) const {
  return cuda::open_device(device.index, device.part < 0 ? nullptr : cuda::context_of(device));
}

std::vector<DeviceHealth> CudaBackend::health(std::span<const Device> devices) const {
  std::vector<DeviceHealth> health;
  for (const Device& device : devices) {
    char pci_bus_id[32] = {};
    if (cudaDeviceGetPCIBusId(pci_bus_id, sizeof(pci_bus_id), device.index) == cudaSuccess) {
      health.push_back(cuda::Nvml::of_process().read(pci_bus_id));
    } else {  // a device without this answer is no error
      static_cast<void>(cudaGetLastError());
      health.push_back({.why_none = fmt::format("CUDA does not tell the PCI address of {}", device.name)});
    }
  }
  return health;
}

std::vector<Device> CudaBackend::partition(const Device& device, std::span<const double> fractions) const {
  require_whole(device, "partition");
  return cuda::split(device, fractions);
}

void CudaBackend::release_partitions(const Device& device, std::chrono::nanoseconds timeout) const {
  require_whole(device, "release_partitions");
  cuda::end_split(device, timeout);
}

std::vector<GpuFacts> CudaBackend::gpu_facts() const {
  std::vector<GpuFacts> all;
  const int count = count_devices().devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) all.push_back(facts_of(ordinal, count));
  return all;
}

}  // namespace paceline
