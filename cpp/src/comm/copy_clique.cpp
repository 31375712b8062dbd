// SPDX-License-Identifier: Apache-2.0
//
// Between memory spaces by copies through the first one's memory, which needs nothing but the devices themselves. What
// must come after what:
//
//   1. A copy out of a rank's memory after what that rank's stream did before the call: the copying stream waits for
//      that rank's `ready`.
//   2. What a rank's stream does after the call after the last copy out of its memory. In a sum that is the copy of the
//      result back into it, which waits for the first rank's `ready`, recorded after all copies out. Where a rank is
//      only read, its stream waits for every `fetched`.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/clique.hpp"

namespace paceline::internal {
namespace {

class CopyClique final : public Clique {
 public:
  CopyClique(std::vector<Rank> ranks, std::string why) : ranks_(std::move(ranks)), why_(std::move(why)) {
    for (const Rank& rank : ranks_) {
      ready_.push_back(rank.opened->make_event(false));
      fetched_.push_back(rank.opened->make_event(false));
    }
  }

  [[nodiscard]] std::string description() const override {
    return fmt::format("copies through {} ({})", home().device.name, why_);
  }

  void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype) override {
    const std::size_t bytes = count * size_of(dtype);
    // The kernel loads 16 bytes at a time where all its buffers lie alike.
    const std::size_t stride = (bytes + 15) / 16 * 16;
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(buffers[0]) % 16;
    reserve(stride * (ranks_.size() - 1) + offset);
    Stream& stream = *home().stream;
    std::vector<const void*> inputs{buffers[0]};
    for (std::size_t r = 1; r < ranks_.size(); ++r) {
      ranks_[r].stream->record(*ready_[r]);
      stream.wait(*ready_[r]);
      void* const landed = static_cast<char*>(landing_->data()) + offset + stride * (r - 1);
      stream.copy(landed, buffers[r], bytes);
      inputs.push_back(landed);
    }
    stream.sum({inputs, buffers[0], count, dtype, 1.0});
    fetch(buffers, bytes, 0);
  }

  void broadcast(std::span<void* const> buffers, std::size_t bytes, std::size_t root) override {
    fetch(buffers, bytes, root);
  }

  void check() override {}
  void close() override {}

 private:
  [[nodiscard]] const Rank& home() const { return ranks_.front(); }

  /// Every other rank takes what `root` has.
  void fetch(std::span<void* const> buffers, std::size_t bytes, std::size_t root) {
    ranks_[root].stream->record(*ready_[root]);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (r == root) continue;
      ranks_[r].stream->wait(*ready_[root]);
      ranks_[r].stream->copy(buffers[r], buffers[root], bytes);
      ranks_[r].stream->record(*fetched_[r]);
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (r != root) ranks_[root].stream->wait(*fetched_[r]);
    }
  }

  void reserve(std::size_t bytes) {
    if (landing_ != nullptr && landing_->bytes() >= bytes) return;
    landing_.reset();  // goes back in the order of the stream, so that the old one makes room for the new one
    landing_ = home().opened->allocate(bytes, *home().stream);
  }

  std::vector<Rank> ranks_;
  std::string why_;
  std::vector<std::unique_ptr<Event>> ready_;
  std::vector<std::unique_ptr<Event>> fetched_;
  std::unique_ptr<Buffer> landing_;
};

}  // namespace

std::unique_ptr<Clique> make_copy_clique(std::vector<Rank> ranks, std::string why) {
  return std::make_unique<CopyClique>(std::move(ranks), std::move(why));
}

}  // namespace paceline::internal
