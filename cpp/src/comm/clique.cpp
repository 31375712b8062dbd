// SPDX-License-Identifier: Apache-2.0
#include "comm/clique.hpp"

#include <utility>

#include <paceline/error.hpp>

namespace paceline::internal {

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
