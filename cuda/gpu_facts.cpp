// SPDX-License-Identifier: Apache-2.0
#include "gpu_facts.hpp"

#include <fmt/format.h>

#include <paceline/error.hpp>

#include "error.hpp"
#include "green_context.hpp"

namespace paceline::cuda {
namespace {

CudaVersion version_of(int number) { return {number / 1000, number % 1000 / 10}; }

std::vector<std::string> peers_of(int ordinal, int gpu_count) {
  std::vector<std::string> peers;
  for (int other = 0; other < gpu_count; ++other) {
    if (other == ordinal) continue;
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, ordinal, other), "asking for its peers", ordinal);
    if (can != 0) peers.push_back(fmt::format("cuda:{}", other));
  }
  return peers;
}

void add_partitions(GpuFacts& facts, int ordinal) {
  try {
    const std::vector<CUdevResource> groups = split_sms(ordinal);
    facts.most_partitions = static_cast<int>(groups.size());
    if (!groups.empty()) facts.partition_sm_count = static_cast<int>(groups.front().sm.smCount);
    if (groups.empty()) facts.why_no_partitions = "CUDA makes no groups of its SMs";
  } catch (const Error& error) {  // this too is a fact about the GPU; the others follow
    facts.why_no_partitions = error.what();
  }
}

}  // namespace

int attribute(cudaDeviceAttr which, int ordinal, int otherwise) noexcept {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, ordinal) == cudaSuccess) return value;
  static_cast<void>(cudaGetLastError());
  return otherwise;
}

GpuFacts facts_of(int ordinal, int gpu_count) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "asking for its properties", ordinal);
  char pci_bus_id[32] = {};
  check(cudaDeviceGetPCIBusId(pci_bus_id, sizeof(pci_bus_id), ordinal), "asking for its PCI address", ordinal);
  int driver = 0;
  int runtime = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version", ordinal);
  check(cudaRuntimeGetVersion(&runtime), "asking for the runtime's version", ordinal);

  GpuFacts facts;
  facts.device = fmt::format("cuda:{}", ordinal);
  facts.model = properties.name;
  facts.pci_bus_id = pci_bus_id;
  facts.numa_node = attribute(cudaDevAttrHostNumaId, ordinal, -1);
  facts.compute_capability = {properties.major, properties.minor};
  facts.sm_count = properties.multiProcessorCount;
  facts.peak_clock_khz = attribute(cudaDevAttrClockRate, ordinal, 0);  // CUDA 13 removed it from the properties
  facts.memory_bytes = properties.totalGlobalMem;
  facts.copy_engine_count = properties.asyncEngineCount;
  facts.peers = peers_of(ordinal, gpu_count);
  facts.driver = version_of(driver);
  facts.runtime = version_of(runtime);
  add_partitions(facts, ordinal);
  return facts;
}

}  // namespace paceline::cuda
