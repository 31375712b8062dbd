// SPDX-License-Identifier: Apache-2.0
#pragma once

// Our own declarations of the part of NCCL's binary interface that paceline uses. So a build without nccl.h can use
// NCCL at run time. If nccl.h is found, tests/cuda/nccl_header.cpp compares every line with it. Values and layouts are
// those of NCCL 2.18. Later versions keep them: they read as much of a Config as its `size` says, and use defaults for
// fields that its `version` did not know.

#include <cuda_runtime_api.h>

#include <climits>
#include <cstddef>

namespace paceline::nccl {

struct Communicator;  // defined by NCCL; we only pass pointers to it
using Comm = Communicator*;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int { kInt8 = 0, kInt32 = 2, kInt64 = 4, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9 };

/// Averages are left out, because NCCL implements those of floating-point numbers as PreMulSum, which never uses NVLink
/// SHARP.
enum ReductionOperation : int { kSum = 0, kMax = 2, kMin = 3 };

struct UniqueId {
  char internal[128];
};

struct Config {
  static constexpr int kUndefined = INT_MIN;

  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;  // padding in 2.18; newer versions read it
};
static_assert(sizeof(void*) != 8 || sizeof(Config) == 48);

using GetVersion = Result(int* version);
using GetErrorString = const char*(Result result);
using GetLastError = const char*(Comm comm);
using GetUniqueId = Result(UniqueId* id);
using CommInitRankConfig = Result(Comm* comm, int rank_count, UniqueId id, int rank, Config* config);
using CommDestroy = Result(Comm comm);
using CommAbort = Result(Comm comm);
using CommGetAsyncError = Result(Comm comm, Result* error);
using GroupStart = Result();
using GroupEnd = Result();
using AllReduce = Result(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation op,
                         Comm comm, cudaStream_t stream);
using Broadcast = Result(const void* send, void* receive, std::size_t count, DataType type, int root, Comm comm,
                         cudaStream_t stream);
using Reduce = Result(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation op,
                      int root, Comm comm, cudaStream_t stream);

}  // namespace paceline::nccl
