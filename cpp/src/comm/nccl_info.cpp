// SPDX-License-Identifier: Apache-2.0
#include <paceline/comm/nccl_info.hpp>

#include <paceline/error.hpp>

#ifdef PACELINE_WITH_CUDA
#include "nccl_library.hpp"
#endif

namespace paceline {

#ifdef PACELINE_WITH_CUDA

NcclInfo nccl_info() {
  try {
    const nccl::Library& library = nccl::library();
    return {.version = nccl::version_text(library.version), .path = library.path, .why_none = {}};
  } catch (const Unavailable& error) {
    return {.version = {}, .path = {}, .why_none = error.what()};
  }
}

void set_nccl_path(const std::string& path) { nccl::set_installed_path(path); }

#else

NcclInfo nccl_info() { return {.version = {}, .path = {}, .why_none = "this build has no CUDA backend"}; }

void set_nccl_path(const std::string&) {}

#endif

}  // namespace paceline
