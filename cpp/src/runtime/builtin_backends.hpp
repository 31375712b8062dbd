// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include <paceline/runtime/backend.hpp>

namespace paceline::internal {

/// The backend of GPUs; null in a build without one. It lives until the process ends.
///
/// The build picks the definition: cuda/cuda_backend.cpp, or host_only.cpp. A call by name works from a static archive
/// too, and does not depend on the order of static initialisation.
[[nodiscard]] const Backend* gpu_backend() noexcept;

/// Why there is no device of this name, if it names a GPU and the build has no backend for GPUs. Otherwise empty.
[[nodiscard]] std::string why_no_gpu(std::string_view name);

[[nodiscard]] const Backend& host_backend() noexcept;

}  // namespace paceline::internal
