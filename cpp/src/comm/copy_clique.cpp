// SPDX-License-Identifier: Apache-2.0
//
// Between memory spaces by copies, which need nothing but the devices themselves. A rank takes what it needs out of the
// others' memory (an all_reduce goes through the first rank's). What must come after what:
//
//   1. A copy out of a rank's memory after what that rank's stream did before the call: the copying stream waits for
//      that rank's `ready`.
//   2. What a rank's stream does after the call after the last copy out of its memory. In an all_reduce that is the
//   copy
//      of the result back into it, which waits for the first rank's `ready`, recorded after all copies out. Where a
//      rank is only read, its stream waits for every `fetched`.
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
  CopyClique(std::vector<Rank> ranks, std::string why)
      : ranks_(std::move(ranks)), why_(std::move(why)), landing_(ranks_.size()) {
    for (const Rank& rank : ranks_) {
      ready_.push_back(rank.opened->make_event(false));
      fetched_.push_back(rank.opened->make_event(false));
    }
  }

  [[nodiscard]] std::string description() const override {
    return fmt::format("copies through {} ({})", home().device.name, why_);
  }

  void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) override {
    for (std::size_t r = 1; r < ranks_.size(); ++r) ranks_[r].stream->record(*ready_[r]);
    reduce_at(0, buffers, buffers[0], count, dtype, op);
    fetch(buffers, count * size_of(dtype), 0);
  }

  void reduce_scatter(std::span<const void* const> wholes, std::span<void* const> parts, std::size_t part_count,
                      DType dtype, ReduceOp op) override {
    for (std::size_t r = 0; r < ranks_.size(); ++r) ranks_[r].stream->record(*ready_[r]);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      std::vector<const void*> sources;
      for (const void* whole : wholes) {
        sources.push_back(static_cast<const char*>(whole) + r * part_count * size_of(dtype));
      }
      reduce_at(r, sources, parts[r], part_count, dtype, op);
    }
    part_as_readers();
  }

  void all_gather(std::span<void* const> buffers, std::size_t part_bytes) override {
    for (std::size_t r = 0; r < ranks_.size(); ++r) ranks_[r].stream->record(*ready_[r]);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      Stream& stream = *ranks_[r].stream;
      for (std::size_t from = 0; from < ranks_.size(); ++from) {
        if (from == r) continue;
        stream.wait(*ready_[from]);
        const std::size_t offset = from * part_bytes;
        stream.copy(static_cast<char*>(buffers[r]) + offset, static_cast<char*>(buffers[from]) + offset, part_bytes);
      }
      stream.record(*fetched_[r]);
    }
    part_as_readers();
  }

  void broadcast(std::span<void* const> buffers, std::size_t bytes, std::size_t root) override {
    fetch(buffers, bytes, root);
  }

  void check() override {}
  void give_up() override {}  // nothing here waits but streams for streams
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

  /// output = op over sources[r], of every rank, on that rank's stream and in its memory; `ready` of the others is
  /// recorded. Its `fetched` is afterwards.
  template <class Sources>
  void reduce_at(std::size_t rank, const Sources& sources, void* output, std::size_t count, DType dtype, ReduceOp op) {
    const std::size_t bytes = count * size_of(dtype);
    // The kernel loads 16 bytes at a time where all its buffers lie alike.
    const std::size_t stride = (bytes + 15) / 16 * 16;
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(sources[rank]) % 16;
    char* landed = reserve(rank, stride * (ranks_.size() - 1) + offset) + offset;
    Stream& stream = *ranks_[rank].stream;
    std::vector<const void*> inputs;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (r == rank) {
        inputs.push_back(sources[r]);
        continue;
      }
      stream.wait(*ready_[r]);
      stream.copy(landed, sources[r], bytes);
      inputs.push_back(landed);
      landed += stride;
    }
    stream.record(*fetched_[rank]);
    stream.reduce({inputs, output, count, dtype, 1.0, op});
  }

  /// Every rank goes on when all others have fetched what they need of it.
  void part_as_readers() {
    for (const Rank& rank : ranks_) {
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (&ranks_[r] != &rank) rank.stream->wait(*fetched_[r]);
      }
    }
  }

  [[nodiscard]] char* reserve(std::size_t rank, std::size_t bytes) {
    std::unique_ptr<Buffer>& landing = landing_[rank];
    if (landing == nullptr || landing->bytes() < bytes) {
      landing.reset();  // goes back in the order of the stream, so that the old one makes room for the new one
      landing = ranks_[rank].opened->allocate(bytes, *ranks_[rank].stream);
    }
    return static_cast<char*>(landing->data());
  }

  std::vector<Rank> ranks_;
  std::string why_;
  std::vector<std::unique_ptr<Event>> ready_;
  std::vector<std::unique_ptr<Event>> fetched_;
  std::vector<std::unique_ptr<Buffer>> landing_;  // by rank
};

}  // namespace

std::unique_ptr<Clique> make_copy_clique(std::vector<Rank> ranks, std::string why) {
  return std::make_unique<CopyClique>(std::move(ranks), std::move(why));
}

}  // namespace paceline::internal
