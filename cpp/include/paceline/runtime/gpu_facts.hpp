// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/export.hpp>

namespace paceline {

/// A version as CUDA counts them: 13.0.
struct CudaVersion {
  int major = 0;
  int minor = 0;
  friend auto operator<=>(const CudaVersion&, const CudaVersion&) = default;
};

/// What the CUDA runtime and the driver tell of one GPU that this process sees; nothing of it changes while it runs.
///
/// A MIG slice is a GPU here, and under CUDA_VISIBLE_DEVICES the first visible one is cuda:0, as everywhere in CUDA.
struct GpuFacts {
  std::string device;      ///< "cuda:0"
  std::string model;       ///< "NVIDIA H100 80GB HBM3"
  std::string pci_bus_id;  ///< "0000:1B:00.0"; slices of one GPU share it
  int numa_node = -1;      ///< of the host, the nearest to it; -1 when the system does not tell
  CudaVersion compute_capability;
  int sm_count = 0;
  int peak_clock_khz = 0;  ///< of the SMs
  std::uint64_t memory_bytes = 0;
  int copy_engine_count = 0;       ///< copies that can run beside kernels, at once
  std::vector<std::string> peers;  ///< the GPUs whose memory it can reach without the host

  int partition_sm_count = 0;     ///< of the smallest part that partition() makes; a part's SMs are a multiple
  int most_partitions = 0;        ///< how many of the smallest there can be
  std::string why_no_partitions;  ///< empty where there can be any

  CudaVersion driver;   ///< the newest CUDA that the driver supports
  CudaVersion runtime;  ///< that this build brings
};

/// Of every GPU, in the order of their numbers; empty where there is none. Makes no context on any.
/// @throws Error if a GPU that is there refuses to answer.
[[nodiscard]] PACELINE_API std::vector<GpuFacts> gpu_facts();

}  // namespace paceline
