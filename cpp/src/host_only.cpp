// SPDX-License-Identifier: Apache-2.0
//
// What a build without the CUDA backend has in its place.
#include <paceline/comm/nccl_info.hpp>

#include "comm/link.hpp"
#include "runtime/builtin_backends.hpp"

namespace paceline {
namespace {

constexpr const char* kNoBackend = "this build has no CUDA backend";

}  // namespace

const Backend* internal::gpu_backend() noexcept { return nullptr; }

std::unique_ptr<internal::Link> internal::make_native_link(const std::vector<Endpoint>&, const CommunicatorOptions&,
                                                           std::string& why_none) {
  why_none = kNoBackend;
  return nullptr;
}

NcclInfo nccl_info() { return {.version = {}, .path = {}, .why_none = kNoBackend}; }

void set_nccl_path(const std::string&) {}

}  // namespace paceline
