// SPDX-License-Identifier: Apache-2.0
//
// Moves data between memory spaces by copies, which only need the devices themselves. Each endpoint copies what it
// needs out of the others' memory; an all_reduce goes through the first endpoint's memory. The order of the work:
//
//   1. Copies run after the earlier work of every endpoint's stream.
//   2. Every endpoint's stream goes on after the last copy out of its memory.
//
// barrier() does both: each stream waits for all others.
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
      nodes_.push_back({endpoint, endpoint.opened->make_event(false), nullptr});
    }
  }

  [[nodiscard]] std::string description() const override {
    return fmt::format("copies through {} ({})", home().device.name, why_);
  }

  void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) override {
    const Piece piece{{buffers.begin(), buffers.end()}};
    barrier();
    reduce_at_root(piece, count, dtype, op);
    barrier();
    copy_from_root(piece, count * size_of(dtype));
    barrier();
  }

  void reduce(std::span<const Piece> pieces, std::size_t count, DType dtype, ReduceOp op) override {
    barrier();
    for (const Piece& piece : pieces) reduce_at_root(piece, count, dtype, op);
    barrier();
  }

  void broadcast(std::span<const Piece> pieces, std::size_t bytes) override {
    barrier();
    for (const Piece& piece : pieces) copy_from_root(piece, bytes);
    barrier();
  }

  void check() override {}
  void give_up() override {}  // only streams wait here, for streams
  void close() override {}

 private:
  struct Node : Endpoint {
    std::unique_ptr<Event> reached;
    std::unique_ptr<Buffer> landing;
  };

  [[nodiscard]] const Node& home() const { return nodes_.front(); }

  void barrier() {
    for (const Node& node : nodes_) node.stream->record(*node.reached);
    for (const Node& node : nodes_) {
      for (const Node& other : nodes_) {
        if (&other != &node) node.stream->wait(*other.reached);
      }
    }
  }

  void reduce_at_root(const Piece& piece, std::size_t count, DType dtype, ReduceOp op) {
    const std::size_t bytes = count * size_of(dtype);
    void* const output = piece.at[piece.root];
    // The kernel loads 16 bytes at a time if all its buffers have the same alignment.
    const std::size_t stride = (bytes + 15) / 16 * 16;
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(output) % 16;
    Node& here = nodes_[piece.root];
    Stream& stream = *here.stream;
    const std::size_t room = stride * (nodes_.size() - 1) + offset;
    char* landed = static_cast<char*>(reserve(here.landing, room, *here.opened, stream)) + offset;
    std::vector<const void*> inputs;
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      if (r == piece.root) {
        inputs.push_back(output);
        continue;
      }
      stream.copy(landed, piece.at[r], bytes);
      inputs.push_back(landed);
      landed += stride;
    }
    stream.reduce({inputs, output, count, dtype, 1.0, op});
  }

  void copy_from_root(const Piece& piece, std::size_t bytes) {
    std::vector<Receiver> receivers;
    for (std::size_t r = 0; r < nodes_.size(); ++r) {
      if (r != piece.root) receivers.push_back({nodes_[r].stream.get(), piece.at[r]});
    }
    nodes_[piece.root].opened->copy_to_all(receivers, piece.at[piece.root], bytes);
  }

  std::vector<Node> nodes_;
  std::string why_;
};

}  // namespace

std::unique_ptr<Link> make_copy_link(const std::vector<Endpoint>& endpoints, std::string why) {
  return std::make_unique<CopyLink>(endpoints, std::move(why));
}

}  // namespace paceline::internal
