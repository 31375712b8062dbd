// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/clique.hpp"

namespace paceline::nccl {

/// NCCL between GPUs, each in a memory space of its own. Null where there is no NCCL to use: why is in `why_none`.
/// @throws Unavailable where NCCL would hang for certain; Error, Timeout if it cannot connect the GPUs.
[[nodiscard]] std::unique_ptr<internal::NativeClique> make_clique(const std::vector<internal::Rank>& ranks,
                                                                  const CommunicatorOptions& options,
                                                                  std::string& why_none);

}  // namespace paceline::nccl
