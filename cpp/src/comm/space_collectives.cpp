// SPDX-License-Identifier: Apache-2.0
#include "comm/space_collectives.hpp"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>

#include <paceline/error.hpp>

namespace paceline::internal {
namespace {

constexpr std::size_t kHome = 0;
constexpr std::size_t kAlignment = 16;  // copies with a smaller alignment are slower

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

SpaceCollectives::SpaceCollectives(std::unique_ptr<Link> link, std::vector<Endpoint> endpoints,
                                   std::size_t staging_bytes)
    : link_(std::move(link)),
      endpoints_(std::move(endpoints)),
      staging_bytes_(aligned(std::max(staging_bytes, std::size_t{1}))),
      owner_(getpid()) {}

SpaceCollectives::~SpaceCollectives() {
  if (getpid() == owner_) return;
  // The devices and the link's thread do not survive fork(), so a child must not touch them.
  for (Buffers& buffers : sums_) {
    for (std::unique_ptr<Buffer>& buffer : buffers) static_cast<void>(buffer.release());
  }
  for (std::unique_ptr<Buffer>& buffer : staging_) static_cast<void>(buffer.release());
  static_cast<void>(link_.release());
}

std::unique_ptr<Buffer> SpaceCollectives::allocate(std::size_t space, std::size_t bytes, Stream& stream) {
  std::unique_ptr<Buffer> buffer = endpoints_[space].opened->allocate(bytes, stream);
  own_.emplace_back(static_cast<const char*>(buffer->data()), bytes);
  return buffer;
}

void SpaceCollectives::broadcast(std::span<const SpaceCopy> copies) {
  std::vector<Transfer> staged;
  for (Transfer& transfer : transfers_of(copies)) {
    if (is_own(transfer)) {
      const Piece whole{transfer.to, kHome};
      link_->broadcast({&whole, 1}, transfer.bytes);
    } else {
      staged.push_back(std::move(transfer));
    }
  }
  if (!staged.empty()) stage(staged);
}

void SpaceCollectives::reserve(std::span<const std::size_t> bytes) {
  for (std::size_t k = 0; k < bytes.size(); ++k) {
    if (k == sums_.size()) sums_.emplace_back();
    if (!sums_[k].empty() && sums_[k].front()->bytes() >= bytes[k]) continue;
    sums_[k].clear();
    sums_[k] = make(std::max(bytes[k], kAlignment));
  }
}

void SpaceCollectives::reduce(std::size_t k, std::size_t count, DType dtype) {
  Piece sums{.root = kHome};
  for (std::size_t r = 0; r < endpoints_.size(); ++r) sums.at.push_back(sum(r, k));
  link_->reduce({&sums, 1}, count, dtype, ReduceOp::sum);
}

std::vector<SpaceCollectives::Transfer> SpaceCollectives::transfers_of(std::span<const SpaceCopy> copies) const {
  std::vector<Transfer> transfers;
  std::map<std::pair<const void*, std::size_t>, std::size_t> known;
  for (const SpaceCopy& copy : copies) {
    if (copy.space >= endpoints_.size() || copy.bytes == 0) continue;
    const auto [entry, is_new] = known.emplace(std::pair{copy.from, copy.bytes}, transfers.size());
    if (is_new) {
      Transfer transfer{.from = copy.from, .bytes = copy.bytes, .to = std::vector<void*>(endpoints_.size(), nullptr)};
      transfer.to[kHome] = const_cast<void*>(copy.from);  // the link takes void*, and only reads home's
      transfers.push_back(std::move(transfer));
    }
    transfers[entry->second].to[copy.space] = copy.to;
  }
  return transfers;
}

bool SpaceCollectives::is_own(const void* data, std::size_t bytes) const {
  const auto* const begin = static_cast<const char*>(data);
  const std::less_equal<> not_after;
  return std::any_of(own_.begin(), own_.end(), [&](const auto& memory) {
    return not_after(memory.first, begin) && not_after(begin + bytes, memory.first + memory.second);
  });
}

bool SpaceCollectives::is_own(const Transfer& transfer) const {
  return std::all_of(transfer.to.begin(), transfer.to.end(),
                     [&](const void* to) { return to != nullptr && is_own(to, transfer.bytes); });
}

SpaceCollectives::Buffers SpaceCollectives::make(std::size_t bytes) {
  Buffers buffers;
  for (const Endpoint& endpoint : endpoints_) buffers.push_back(endpoint.opened->allocate(bytes, *endpoint.stream));
  return buffers;
}

/// Packs scattered parameters, so that the number of collectives does not grow with the number of parameters.
void SpaceCollectives::stage(std::span<const Transfer> transfers) {
  std::size_t total = 0;
  for (const Transfer& transfer : transfers) total += aligned(transfer.bytes);
  const std::size_t room = std::min(total, staging_bytes_);
  if (staging_.empty() || staging_.front()->bytes() < room) {
    staging_.clear();
    staging_ = make(room);
  }
  std::vector<Section> sections;
  std::size_t used = 0;
  for (const Transfer& transfer : transfers) {
    for (std::size_t begin = 0; begin < transfer.bytes;) {
      const std::size_t bytes = std::min(transfer.bytes - begin, room - used);
      sections.push_back({&transfer, begin, bytes, used});
      begin += bytes;
      used += aligned(bytes);
      if (used < room) continue;
      send(sections, used);
      sections.clear();
      used = 0;
    }
  }
  if (used > 0) send(sections, used);
}

void SpaceCollectives::send(std::span<const Section> sections, std::size_t bytes) {
  Piece whole{.root = kHome};
  for (const std::unique_ptr<Buffer>& buffer : staging_) whole.at.push_back(buffer->data());
  const auto staged = [&](std::size_t space, const Section& section) {
    return static_cast<char*>(whole.at[space]) + section.offset;
  };
  for (const Section& section : sections) {
    const auto* const from = static_cast<const char*>(section.transfer->from) + section.begin;
    endpoints_[kHome].stream->copy(staged(kHome, section), from, section.bytes);
  }
  link_->broadcast({&whole, 1}, bytes);
  for (std::size_t r = 0; r < endpoints_.size(); ++r) {
    if (r == kHome) continue;
    for (const Section& section : sections) {
      if (section.transfer->to[r] == nullptr) continue;
      endpoints_[r].stream->copy(static_cast<char*>(section.transfer->to[r]) + section.begin, staged(r, section),
                                 section.bytes);
    }
  }
}

}  // namespace paceline::internal
