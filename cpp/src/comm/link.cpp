// SPDX-License-Identifier: Apache-2.0
#include "comm/link.hpp"

#include <utility>

#include <paceline/error.hpp>

namespace paceline::internal {

Link::~Link() = default;

void* reserve(std::unique_ptr<Buffer>& buffer, std::size_t bytes, AsyncDevice& device, Stream& stream) {
  if (buffer == nullptr || buffer->bytes() < bytes) {
    buffer.reset();  // returns in the order of the stream, so the old memory makes room for the new
    buffer = device.allocate(bytes, stream);
  }
  return buffer->data();
}

std::unique_ptr<Link> make_link(std::vector<Endpoint> endpoints, const CommunicatorOptions& options) {
  if (options.transport == Transport::copies) return make_copy_link(endpoints, "as asked for");
  std::string why_none;
  std::unique_ptr<Link> native = make_native_link(endpoints, options, why_none);
  if (native != nullptr) return native;
  if (options.transport == Transport::nccl) throw Unavailable("Communicator: " + why_none);
  return make_copy_link(endpoints, std::move(why_none));
}

}  // namespace paceline::internal
