// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "nccl_api.hpp"

namespace paceline::nccl {

/// The oldest NCCL that this library works with: the first that gives memory.
constexpr int kOldestVersion = 21900;

/// NCCL, opened at run time: nothing links it. A plain value; the library behind it is never closed.
struct Library {
  int version = 0;   ///< 23007: 2.30.7
  std::string path;  ///< the file it came from

  GetErrorString* get_error_string = nullptr;
  GetLastError* get_last_error = nullptr;
  GetUniqueId* get_unique_id = nullptr;
  CommInitRankConfig* comm_init_rank_config = nullptr;
  CommDestroy* comm_destroy = nullptr;
  CommAbort* comm_abort = nullptr;
  CommGetAsyncError* comm_get_async_error = nullptr;
  GroupStart* group_start = nullptr;
  GroupEnd* group_end = nullptr;
  AllReduce* all_reduce = nullptr;
  ReduceScatter* reduce_scatter = nullptr;
  AllGather* all_gather = nullptr;
  Broadcast* broadcast = nullptr;
  Reduce* reduce = nullptr;
  MemAlloc* mem_alloc = nullptr;
  MemFree* mem_free = nullptr;
  CommRegister* comm_register = nullptr;
  CommDeregister* comm_deregister = nullptr;
};

/// The NCCL of this process, looked for at the first call that finds one, in this order: a copy that is loaded already
/// (PyTorch's: two copies would not know of each other's work), the file that PACELINE_NCCL_LIBRARY names, the one
/// given to set_installed_path(), what the system finds as libnccl.so.2. Any thread.
/// @throws Unavailable if there is none, or the first one found is too old or incomplete: which, and what to do.
const Library& library();

/// A file that was found installed, e.g. by Python's packages; it need not exist. Until library() has found one.
void set_installed_path(std::string path);

/// Opens this one file, whatever library() has. @throws Unavailable as library() does.
[[nodiscard]] Library open_library(const std::string& path);

/// "2.30.7"
[[nodiscard]] std::string version_text(int version);

}  // namespace paceline::nccl
