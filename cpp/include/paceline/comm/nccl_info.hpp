// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <paceline/export.hpp>

namespace paceline {

/// NVIDIA's library for collectives between GPUs, as this process has it.
struct PACELINE_API NcclInfo {
  std::string version;   ///< "2.30.7"; empty if there is none to use
  std::string path;      ///< the file that is loaded
  std::string why_none;  ///< a sentence, where version is empty
};

/// Loads NCCL if it is not loaded yet: the copy that the process has already, the file that the environment variable
/// PACELINE_NCCL_LIBRARY names, the one given to set_nccl_path(), what the system finds. Needs no GPU. Any thread.
[[nodiscard]] PACELINE_API NcclInfo nccl_info();

/// Where an NCCL is installed that the system's own search would not find, e.g. by pip. It need not exist; without
/// effect once NCCL is loaded.
PACELINE_API void set_nccl_path(const std::string& path);

}  // namespace paceline
