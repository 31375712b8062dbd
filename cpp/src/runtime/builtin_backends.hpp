// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/runtime/backend.hpp>

namespace paceline::internal {

/// The backend of GPUs; null in a build without one. It lives until the process ends.
///
/// The build picks the definition: cuda/cuda_backend.cpp, or host_only.cpp. A call by name works from a static archive
/// too, and does not depend on the order of static initialisation.
[[nodiscard]] const Backend* gpu_backend() noexcept;

[[nodiscard]] const Backend& host_backend() noexcept;

}  // namespace paceline::internal
