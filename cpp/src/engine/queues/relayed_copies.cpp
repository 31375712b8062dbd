// SPDX-License-Identifier: Apache-2.0
#include "engine/queues/relayed_copies.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace paceline::internal {
namespace {

// Fewer bytes arrive sooner if nobody waits for anybody.
constexpr std::size_t kLeastRelayed = std::size_t{256} << 10;
// Of a large bucket the next GPU pulls one piece while another one still comes.
constexpr std::size_t kPiece = std::size_t{32} << 20;

std::size_t bytes_of(const CopyTarget& target) {
  std::size_t bytes = 0;
  for (const SpaceCopy& copy : target.copies) bytes += copy.bytes;
  return bytes;
}

bool alike(const CopyTarget& a, const CopyTarget& b) {
  return std::ranges::equal(a.copies, b.copies, [](const SpaceCopy& one, const SpaceCopy& other) {
    return one.from == other.from && one.bytes == other.bytes;
  });
}

/// Bytes [begin, end) of all copies one after the other, out of the memory of `source`; null: out of home's. Where
/// targets keep copies one behind the other, these go from one to the next in one.
void pull(const CopyTarget& target, const CopyTarget* source, std::size_t begin, std::size_t end) {
  char* to = nullptr;
  const char* from = nullptr;
  std::size_t bytes = 0, passed = 0;
  for (std::size_t i = 0; i < target.copies.size(); ++i) {
    const SpaceCopy& copy = target.copies[i];
    const std::size_t first = std::max(begin, passed);
    const std::size_t last = std::min(end, passed + copy.bytes);
    if (first < last) {
      char* const next_to = static_cast<char*>(copy.to) + (first - passed);
      const char* const next_from =
          static_cast<const char*>(source != nullptr ? source->copies[i].to : copy.from) + (first - passed);
      if (source == nullptr || next_to != to + bytes || next_from != from + bytes) {
        target.on().copy(to, from, bytes);
        to = next_to;
        from = next_from;
        bytes = 0;
      }
      bytes += last - first;
    }
    passed += copy.bytes;
  }
  target.on().copy(to, from, bytes);
}

}  // namespace

void copy_to_all(AsyncDevice& home, std::span<const CopyTarget> targets, bool relays) {
  if (targets.empty()) return;
  const std::size_t total = bytes_of(targets.front());
  const auto like_the_first = [&](const CopyTarget& target) { return alike(target, targets.front()); };
  if (targets.size() == 1 || !std::ranges::all_of(targets, like_the_first)) {
    for (const CopyTarget& target : targets) pull(target, nullptr, 0, bytes_of(target));
    return;
  }
  if (!relays || total < kLeastRelayed) {
    for (std::size_t i = 0; i < targets.front().copies.size(); ++i) {
      const SpaceCopy& first = targets.front().copies[i];
      std::vector<Receiver> by_host;
      for (const CopyTarget& target : targets) {
        by_host.push_back({&target.on(), target.copies[i].to});
        if (!home.accesses(*target.device)) continue;
        home.copy_to_all({&by_host.back(), 1}, first.from, first.bytes);
        by_host.pop_back();
      }
      home.copy_to_all(by_host, first.from, first.bytes);
    }
    return;
  }
  for (std::size_t begin = 0; begin < total; begin += kPiece) {
    const CopyTarget* last = nullptr;
    for (const CopyTarget& target : targets) {
      if (last != nullptr) target.on().wait(*last->relayed);
      pull(target, last, begin, std::min(begin + kPiece, total));
      target.on().record(*target.relayed);
      last = &target;
    }
  }
}

}  // namespace paceline::internal
