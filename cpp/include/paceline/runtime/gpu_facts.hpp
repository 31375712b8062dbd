// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include <paceline/export.hpp>

namespace paceline {

/// A CUDA version, such as 13.0.
struct CudaVersion {
  int major = 0;
  int minor = 0;
  friend auto operator<=>(const CudaVersion&, const CudaVersion&) = default;
};

/// What the CUDA runtime and the driver say about one GPU that this process sees. The facts are constant while the
/// process runs.
///
/// A MIG slice counts as a GPU. Under CUDA_VISIBLE_DEVICES the first visible GPU is cuda:0.
struct GpuFacts {
  std::string device;      ///< "cuda:0"
  std::string model;       ///< "NVIDIA H100 80GB HBM3"
  std::string pci_bus_id;  ///< "0000:1B:00.0"; slices of one GPU share it
  int numa_node = -1;      ///< the nearest NUMA node of the host; -1 if the system does not tell
  CudaVersion compute_capability;
  int sm_count = 0;
  int peak_clock_khz = 0;  ///< of the SMs
  std::uint64_t memory_bytes = 0;
  int copy_engine_count = 0;       ///< the number of copies that can run at once beside kernels
  std::vector<std::string> peers;  ///< the GPUs whose memory it can access directly

  int partition_sm_count = 0;  ///< the SMs of the smallest part that partition() makes; every part has a multiple of it
  int most_partitions = 0;     ///< how many parts of the smallest size fit
  std::string why_no_partitions;  ///< empty if the GPU can be partitioned

  std::string mig;  ///< of a MIG slice: what that means for the process; empty for a whole GPU

  CudaVersion driver;   ///< the newest CUDA that the driver supports
  CudaVersion runtime;  ///< the CUDA runtime that this build contains
};

/// The facts of every GPU, ordered by number; empty if there is none. Creates no CUDA context.
/// @throws Error if a GPU refuses to answer.
[[nodiscard]] PACELINE_API std::vector<GpuFacts> gpu_facts();

}  // namespace paceline
