// SPDX-License-Identifier: Apache-2.0
//
// What a build without the CUDA backend has in its place.
#include <fmt/format.h>

#include <paceline/comm/nccl_info.hpp>

#include "comm/link.hpp"
#include "runtime/builtin_backends.hpp"

namespace paceline {
namespace {

constexpr const char* kNoBackend = "this build has no CUDA backend";

}  // namespace

const Backend* internal::gpu_backend() noexcept { return nullptr; }

std::string internal::why_no_gpu(std::string_view name) {
  if (name != "cuda" && !name.starts_with("cuda:")) return {};
  return fmt::format(
      "there is no device '{}': {} (it is built where there is nvcc or, by pip, a driver of 580 or newer; "
      "PACELINE_CUDA=ON pip install says what is missing)",
      name, kNoBackend);
}

std::unique_ptr<internal::Link> internal::make_native_link(const std::vector<Endpoint>&, const CommunicatorOptions&,
                                                           std::string& why_none) {
  why_none = kNoBackend;
  return nullptr;
}

NcclInfo nccl_info() { return {.version = {}, .path = {}, .why_none = kNoBackend}; }

void set_nccl_path(const std::string&) {}

}  // namespace paceline
