// SPDX-License-Identifier: Apache-2.0
//
// The machine's memory: allocations, and checks of each access.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "machine.hpp"

namespace fake {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr unsigned char kFresh = 0xFF;  // a NaN in every floating-point type
constexpr unsigned char kFreed = 0xDB;

}  // namespace

bool Machine::out_of_memory_is_due() {
  if (allocations_until_failure < 0) return false;
  return --allocations_until_failure < 0;
}

Allocation* Machine::allocate(int device, std::size_t bytes) {
  if (out_of_memory_is_due()) return nullptr;
  if (device >= 0 && used_[device] + bytes > memory_bytes(device)) return nullptr;
  if (device >= 0) used_[device] += bytes;
  auto allocation = std::make_unique<Allocation>();
  allocation->bytes = bytes;
  allocation->device = device;
  allocation->storage.resize(bytes + kAlignment);
  const auto address = reinterpret_cast<std::uintptr_t>(allocation->storage.data());
  allocation->data = allocation->storage.data() + (kAlignment - address % kAlignment) % kAlignment;
  std::memset(allocation->data, kFresh, bytes);
  Allocation* raw = allocation.get();
  allocations_[raw->data] = std::move(allocation);
  return raw;
}

Allocation* Machine::find(const void* data) {
  const auto* address = static_cast<const std::byte*>(data);
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  Allocation& candidate = *std::prev(next)->second;
  return address < candidate.data + std::max<std::size_t>(candidate.bytes, 1) ? &candidate : nullptr;
}

/// Keeps the storage until the next boot, so that its address is not reused and late accesses are recognised.
void Machine::free(Allocation* allocation) {
  allocation->freed = true;
  if (allocation->device >= 0) used_[allocation->device] -= allocation->bytes;
  // A pool may be destroyed before its last memory has come back.
  if (pools.contains(allocation->pool)) allocation->pool->used -= allocation->bytes;
  std::memset(allocation->data, kFreed, allocation->bytes);
}

bool Machine::reaches(int device, const Allocation& allocation) const {
  if (allocation.device < 0 || allocation.device == device) return true;
  if (allocation.mapped) return false;
  if (allocation.pool == nullptr) return peer_access.contains({device, allocation.device});
  // Access to a device does not include its pools. A pool of an earlier machine gave access to that one's devices.
  return !pools.contains(allocation.pool) || allocation.pool->peers.contains(device);
}

void Machine::move(void* to, const void* from, std::size_t bytes) {
  const Allocation* const source = find(from);
  const Allocation* const target = find(to);
  if (source != nullptr && target != nullptr) {
    const std::pair<int, int> pair{source->device, target->device};
    // A copy is direct where either side accesses the other. Otherwise the driver stages it, which works.
    const bool direct = reaches(pair.second, *source) || reaches(pair.first, *target);
    if (direct && lies.contains(pair)) {
      std::memset(to, 0, bytes);
      return;
    }
  }
  std::memcpy(to, from, bytes);
}

void Machine::access(const void* data, std::size_t bytes, bool write) {
  // After a sticky error CUDA runs nothing more on the device. Here work still runs, but its accesses do not count.
  if (bytes == 0 || sticky.contains(current_stream->device)) return;
  Allocation* const allocation = find(data);
  const char* const name = current->name;
  if (allocation == nullptr) {
    if (settings_.foreign_memory) return;
    complain(std::string(name) + " touches memory that no device has");
    return;
  }
  if (!reaches(current_stream->device, *allocation)) {
    if (name != kCopy) return break_down(current_stream->device, cudaErrorIllegalAddress);
    ++driver_staged_copies;
  }
  if (allocation->device >= 0 && allocation->device != current_stream->device) current_cost += peer_copy_seconds;
  const auto begin = static_cast<std::size_t>(static_cast<const std::byte*>(data) - allocation->data);
  const std::size_t end = begin + bytes;
  if (end > allocation->bytes) complain(std::string(name) + " goes beyond the end of an allocation");
  if (allocation->freed) complain(std::string(name) + " touches memory that was given back");
  Stream& stream = *current_stream;
  std::vector<Access>& accesses = allocation->accesses;
  for (const Access& earlier : accesses) {
    const bool overlaps = earlier.begin < end && begin < earlier.end;
    if (!overlaps || !(write || earlier.write) || stream.clock.covers(earlier.stream, earlier.count)) continue;
    complain(std::string(name) + (write ? " writes" : " reads") + " what " + earlier.name +
             (earlier.write ? " writes" : " reads") + " on another stream, and nothing orders the two");
  }
  // A write replaces the earlier accesses that it covers: later accesses must come after it, and it comes after them.
  if (write) {
    std::erase_if(accesses, [&](const Access& earlier) { return begin <= earlier.begin && earlier.end <= end; });
  } else {
    std::erase_if(accesses, [&](const Access& earlier) {
      return !earlier.write && earlier.stream == stream.id && begin <= earlier.begin && earlier.end <= end;
    });
  }
  accesses.push_back({begin, end, stream.id, stream.count, write, name});
}

}  // namespace fake
