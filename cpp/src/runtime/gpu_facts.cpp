// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/gpu_facts.hpp>

#include <utility>

#include <paceline/runtime/backend.hpp>

namespace paceline {

std::vector<GpuFacts> Backend::gpu_facts() const { return {}; }

std::vector<GpuFacts> gpu_facts() {
  std::vector<GpuFacts> all;
  for (const Backend* backend : backends()) {
    for (GpuFacts& facts : backend->gpu_facts()) all.push_back(std::move(facts));
  }
  return all;
}

}  // namespace paceline
