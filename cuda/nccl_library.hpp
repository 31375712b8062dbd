// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "nccl_api.hpp"

namespace paceline::nccl {

/// The oldest NCCL that paceline supports. nccl_api.hpp declares its interface: 2.18 is the first version with these
/// fields of a Config.
constexpr int kOldestVersion = 21800;

/// NCCL, opened at run time and never linked. A plain value; the library behind it is never closed.
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
  Broadcast* broadcast = nullptr;
  Reduce* reduce = nullptr;
};

/// The NCCL of this process. Calls search in this order until one is found: the copy that is already loaded (PyTorch's;
/// two copies would not know each other's work), the file in PACELINE_NCCL_LIBRARY, the file given to
/// set_installed_path(), and libnccl.so.2 as the system finds it. Any thread.
/// @throws Unavailable if there is none, or if the first one found is too old or incomplete. It names the file and says
/// what to do.
const Library& library();

/// Sets the path of an installed file, e.g. one of pip's. The file need not exist. No effect after library() has found
/// one.
void set_installed_path(std::string path);

/// Opens this file, independently of library(). @throws Unavailable like library().
[[nodiscard]] Library open_library(const std::string& path);

/// "2.30.7"
[[nodiscard]] std::string version_text(int version);

}  // namespace paceline::nccl
