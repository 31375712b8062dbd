// SPDX-License-Identifier: Apache-2.0
//
// Moves data between memory spaces by copies, which only need the devices themselves. Each endpoint copies what it
// needs out of the others' memory; an all_reduce goes through the first endpoint's memory. The order of the work:
//
//   1. A copy out of an endpoint's memory runs after the earlier work of that endpoint's stream: the copying stream
//      waits for the endpoint's `ready`.
//   2. An endpoint's stream goes on after the last copy out of its memory. Where the endpoint is only read, its stream
//      waits for every `fetched`. In an all_reduce the copy of the result into its memory waits for the first
//      endpoint's `ready`, which is recorded after all copies out.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/link.hpp"

namespace paceline::internal {
namespace {

class CopyLink final : public Link {
 public:
  CopyLink(const std::vector<Endpoint>& endpoints, std::string why) : why_(std::move(why)) {
    for (const Endpoint& endpoint : endpoints) {
      nodes_.push_back({endpoint, endpoint.opened->make_event(false), endpoint.opened->make_event(false), nullptr});
    }
  }

  [[nodiscard]] std::string description() const override {
    return fmt::format("copies through {} ({})", home().device.name, why_);
  }

  void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) override {
    for (std::size_t r = 1; r < nodes_.size(); ++r) nodes_[r].stream->record(*nodes_[r].ready);
    reduce_at(0, buffers, buffers[0], count, dtype, op);
    fetch(buffers, count * size_of(dtype), 0);
  }

  void reduce_scatter(std::span<const void* const> wholes, std::span<void* const> parts, std::size_t part_count,
                      DType dtype, ReduceOp op) override {
    for (const Node& node : nodes_) node.stream->record(*node.ready);
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      std::vector<const void*> sources;
      for (const void* whole : wholes) {
        sources.push_back(static_cast<const char*>(whole) + r * part_count * size_of(dtype));
      }
      reduce_at(r, sources, parts[r], part_count, dtype, op);
    }
    part_as_readers();
  }

  void all_gather(std::span<void* const> buffers, std::size_t part_bytes) override {
    for (const Node& node : nodes_) node.stream->record(*node.ready);
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      Stream& stream = *nodes_[r].stream;
      for (std::size_t from = 0; from < nodes_.size(); ++from) {
        if (from == r) continue;
        stream.wait(*nodes_[from].ready);
        const std::size_t offset = from * part_bytes;
        stream.copy(static_cast<char*>(buffers[r]) + offset, static_cast<char*>(buffers[from]) + offset, part_bytes);
      }
      stream.record(*nodes_[r].fetched);
    }
    part_as_readers();
  }

  void broadcast(std::span<void* const> buffers, std::size_t bytes, std::size_t root) override {
    fetch(buffers, bytes, root);
  }

  void check() override {}
  void give_up() override {}  // only streams wait here, for streams
  void close() override {}

 private:
  struct Node : Endpoint {
    std::unique_ptr<Event> ready;
    std::unique_ptr<Event> fetched;
    std::unique_ptr<Buffer> landing;
  };

  [[nodiscard]] const Node& home() const { return nodes_.front(); }

  /// Every other endpoint copies the buffer of `root`.
  void fetch(std::span<void* const> buffers, std::size_t bytes, std::size_t root) {
    nodes_[root].stream->record(*nodes_[root].ready);
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      if (r == root) continue;
      nodes_[r].stream->wait(*nodes_[root].ready);
      nodes_[r].stream->copy(buffers[r], buffers[root], bytes);
      nodes_[r].stream->record(*nodes_[r].fetched);
    }
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      if (r != root) nodes_[root].stream->wait(*nodes_[r].fetched);
    }
  }

  /// output = op over all sources, on the stream of `endpoint` and in its memory. Requires: the others' `ready` is
  /// recorded. Records its `fetched`.
  template <class Sources>
  void reduce_at(std::size_t endpoint, const Sources& sources, void* output, std::size_t count, DType dtype,
                 ReduceOp op) {
    const std::size_t bytes = count * size_of(dtype);
    // The kernel loads 16 bytes at a time if all its buffers have the same alignment.
    const std::size_t stride = (bytes + 15) / 16 * 16;
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(sources[endpoint]) % 16;
    Node& here = nodes_[endpoint];
    Stream& stream = *here.stream;
    const std::size_t room = stride * (nodes_.size() - 1) + offset;
    char* landed = static_cast<char*>(reserve(here.landing, room, *here.opened, stream)) + offset;
    std::vector<const void*> inputs;
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      if (r == endpoint) {
        inputs.push_back(sources[r]);
        continue;
      }
      stream.wait(*nodes_[r].ready);
      stream.copy(landed, sources[r], bytes);
      inputs.push_back(landed);
      landed += stride;
    }
    stream.record(*here.fetched);
    stream.reduce({inputs, output, count, dtype, 1.0, op});
  }

  /// Every endpoint goes on after all others have copied what they need out of its memory.
  void part_as_readers() {
    for (const Node& reader : nodes_) {
      for (const Node& other : nodes_) {
        if (&other != &reader) reader.stream->wait(*other.fetched);
      }
    }
  }

  std::vector<Node> nodes_;
  std::string why_;
};

}  // namespace

std::unique_ptr<Link> make_copy_link(const std::vector<Endpoint>& endpoints, std::string why) {
  return std::make_unique<CopyLink>(endpoints, std::move(why));
}

}  // namespace paceline::internal
