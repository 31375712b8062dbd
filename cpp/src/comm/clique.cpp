// SPDX-License-Identifier: Apache-2.0
#include "comm/clique.hpp"

#include <utility>

#include <paceline/error.hpp>

#ifdef PACELINE_WITH_CUDA
#include "nccl_clique.hpp"
#endif

namespace paceline::internal {

std::unique_ptr<NativeClique> make_native_clique([[maybe_unused]] const std::vector<Rank>& ranks,
                                                 [[maybe_unused]] const CommunicatorOptions& options,
                                                 std::string& why_none) {
#ifdef PACELINE_WITH_CUDA
  return nccl::make_clique(ranks, options, why_none);
#else
  why_none = "this build has no CUDA backend";
  return nullptr;
#endif
}

Clique::~Clique() = default;

std::unique_ptr<Clique> make_clique(std::vector<Rank> ranks, const CommunicatorOptions& options) {
  if (options.transport == Transport::copies) return make_copy_clique(std::move(ranks), "as asked for");
  std::string why_none;
  std::unique_ptr<Clique> native = make_native_clique(ranks, options, why_none);
  if (native != nullptr) return native;
  if (options.transport == Transport::nccl) throw Unavailable("Communicator: " + why_none);
  return make_copy_clique(std::move(ranks), std::move(why_none));
}

}  // namespace paceline::internal
