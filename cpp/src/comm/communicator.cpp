// SPDX-License-Identifier: Apache-2.0
#include <paceline/comm/communicator.hpp>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <paceline/error.hpp>

#include "comm/block_task.hpp"
#include "comm/buffer_checks.hpp"

namespace paceline {
namespace {

using internal::Argument;

// Bytes read and written in one block, over all buffers: half of the smallest second-level cache in use (256 KiB), so
// that what a block reads is still there when it is written to.
constexpr std::size_t kBlockTraffic = 128 * 1024;
// Per buffer at least a page, so that hardware prefetching gets going and a claim (well under 1 us) is cheap against
// its block; at most 32 KiB, so that the last block is short and nobody waits long for the worker that has it.
constexpr std::size_t kMinBlockBytes = 4 * 1024;
constexpr std::size_t kMaxBlockBytes = 32 * 1024;
// Up to this traffic the caller does the work: waking a parked worker takes some 10 to 50 us until it runs, in which
// one core moves a few hundred KiB.
constexpr std::size_t kInlineTraffic = 256 * 1024;

char* at(const BufferView& view, std::size_t element) {
  return static_cast<char*>(view.data) + element * size_of(view.dtype);
}

// [0, count) of every buffer cut into blocks of one size (the last may be shorter), the whole `repeats` times.
struct Blocks {
  std::size_t count;
  std::size_t block_elements;
  std::size_t blocks_per_repeat;
  std::size_t block_count;

  // `streams`: how many buffers a block touches.
  Blocks(std::size_t element_count, std::size_t element_bytes, std::size_t streams, std::size_t repeats)
      : count(element_count),
        block_elements(std::clamp(kBlockTraffic / streams, kMinBlockBytes, kMaxBlockBytes) / element_bytes),
        blocks_per_repeat((element_count + block_elements - 1) / block_elements),
        block_count(blocks_per_repeat * repeats) {}

  struct Block {
    std::size_t repeat;
    std::size_t begin;
    std::size_t size;
  };
  [[nodiscard]] Block operator[](std::size_t index) const {
    const std::size_t begin = index % blocks_per_repeat * block_elements;
    return {index / blocks_per_repeat, begin, std::min(block_elements, count - begin)};
  }
};

template <class Work>
void run(DeviceGroup& group, const Blocks& blocks, std::size_t traffic_bytes, Work work) {
  if (blocks.block_count == 0) return;
  if (traffic_bytes <= kInlineTraffic || blocks.block_count == 1) {
    for (std::size_t i = 0; i < blocks.block_count; ++i) work(blocks[i]);
  } else {
    internal::run_blocks(group, blocks.block_count,
                         [blocks, work = std::move(work)](std::size_t i) { work(blocks[i]); });
  }
}

// Inputs as reduce_block wants them, without an allocation for up to 64.
class Pointers {
 public:
  Pointers(const std::vector<BufferView>& views, std::size_t element) {
    const void** to = inline_;
    if (views.size() > std::size(inline_)) {
      many_.resize(views.size());
      to = many_.data();
    }
    for (std::size_t i = 0; i < views.size(); ++i) to[i] = at(views[i], element);
    span_ = {to, views.size()};
  }
  Pointers(const Pointers&) = delete;
  Pointers& operator=(const Pointers&) = delete;
  [[nodiscard]] std::span<const void* const> span() const { return span_; }

 private:
  const void* inline_[64];
  std::vector<const void*> many_;
  std::span<const void* const> span_;
};

void copy(const BufferView& to, std::size_t to_element, const BufferView& from, std::size_t from_element,
          std::size_t count) {
  char* target = at(to, to_element);
  const char* source = at(from, from_element);
  if (target != source) std::memcpy(target, source, count * size_of(to.dtype));
}

// Small messages never reach the group, which would say so itself.
void check_open(const char* call, const DeviceGroup& group) {
  if (group.closed()) throw Unavailable(fmt::format("{}: the device group is closed. Make a new one.", call));
}

}  // namespace

Communicator::Communicator(DeviceGroup group) : group_(std::move(group)) {
  const Device& first = group_.devices().front();
  for (const Device& device : group_.devices()) {
    if (device.kind != DeviceKind::host) {
      throw Unavailable(fmt::format("Communicator: {} is no host device, and collectives on others are not built yet; "
                                    "make a group of host devices",
                                    device.name),
                        device.name);
    }
    if (device.memory_space == first.memory_space) continue;
    throw InvalidArgument(fmt::format("Communicator: {} is in memory space '{}' and {} in '{}'; host collectives need "
                                      "one space: make a group of devices that share one",
                                      first.name, first.memory_space, device.name, device.memory_space),
                          device.name);
  }
}

void Communicator::all_reduce(std::span<const BufferView> buffers, ReduceOp op) {
  const Argument argument{"all_reduce", "buffers", buffers};
  internal::check_op("all_reduce", op);
  internal::check_one_per_device(argument, group_);
  internal::check_alike(argument);
  internal::check_disjoint(argument);
  check_open("all_reduce", group_);

  if (buffers.size() == 1) return;  // every operation over one value is that value
  const DType dtype = buffers.front().dtype;
  const Blocks blocks(buffers.front().count, size_of(dtype), buffers.size(), 1);
  const std::size_t traffic = 2 * buffers.size() * buffers.front().count * size_of(dtype);
  std::vector<BufferView> views(buffers.begin(), buffers.end());
  run(group_, blocks, traffic, [views = std::move(views), dtype, op](const Blocks::Block& block) {
    // Into the first buffer, whose block is then copied out of the cache to the others.
    const Pointers inputs(views, block.begin);
    reduce_block(inputs.span(), at(views[0], block.begin), block.size, dtype, op);
    for (std::size_t d = 1; d < views.size(); ++d) copy(views[d], block.begin, views[0], block.begin, block.size);
  });
}

void Communicator::reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs,
                                  ReduceOp op) {
  const Argument whole{"reduce_scatter", "inputs", inputs};
  const Argument parts{"reduce_scatter", "outputs", outputs};
  internal::check_op("reduce_scatter", op);
  internal::check_one_per_device(whole, group_);
  internal::check_one_per_device(parts, group_);
  internal::check_alike(whole);
  internal::check_alike(parts);
  internal::check_parts(whole, parts, group_.size());
  internal::check_disjoint(parts);
  internal::check_disjoint_or_own_part(whole, parts);
  check_open("reduce_scatter", group_);

  const DType dtype = inputs.front().dtype;
  const std::size_t part_size = outputs.front().count;
  const Blocks blocks(part_size, size_of(dtype), inputs.size() + 1, outputs.size());
  const std::size_t traffic = (inputs.size() + 1) * inputs.front().count * size_of(dtype);
  std::vector<BufferView> from(inputs.begin(), inputs.end());
  std::vector<BufferView> to(outputs.begin(), outputs.end());
  run(group_, blocks, traffic,
      [from = std::move(from), to = std::move(to), part_size, dtype, op](const Blocks::Block& block) {
        const Pointers pointers(from, block.repeat * part_size + block.begin);
        reduce_block(pointers.span(), at(to[block.repeat], block.begin), block.size, dtype, op);
      });
}

void Communicator::all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) {
  const Argument parts{"all_gather", "inputs", inputs};
  const Argument whole{"all_gather", "outputs", outputs};
  internal::check_one_per_device(parts, group_);
  internal::check_one_per_device(whole, group_);
  internal::check_alike(parts);
  internal::check_alike(whole);
  internal::check_parts(whole, parts, group_.size());
  internal::check_disjoint(whole);
  internal::check_disjoint_or_own_part(whole, parts);
  check_open("all_gather", group_);

  const std::size_t part_size = inputs.front().count;
  const std::size_t element_bytes = size_of(inputs.front().dtype);
  const Blocks blocks(part_size, element_bytes, outputs.size() + 1, inputs.size());
  const std::size_t traffic = (outputs.size() + 1) * outputs.front().count * element_bytes;
  std::vector<BufferView> from(inputs.begin(), inputs.end());
  std::vector<BufferView> to(outputs.begin(), outputs.end());
  run(group_, blocks, traffic, [from = std::move(from), to = std::move(to), part_size](const Blocks::Block& block) {
    const BufferView& source = from[block.repeat];
    for (const BufferView& target : to) {
      copy(target, block.repeat * part_size + block.begin, source, block.begin, block.size);
    }
  });
}

void Communicator::broadcast(std::span<const BufferView> buffers, std::size_t root) {
  const Argument argument{"broadcast", "buffers", buffers};
  internal::check_one_per_device(argument, group_);
  if (root >= group_.size()) {
    throw InvalidArgument(fmt::format("broadcast: root is {}, but the group has {} devices; use 0 to {}", root,
                                      group_.size(), group_.size() - 1));
  }
  internal::check_alike(argument);
  internal::check_disjoint(argument);
  check_open("broadcast", group_);

  if (buffers.size() == 1) return;
  const std::size_t element_bytes = size_of(buffers.front().dtype);
  const Blocks blocks(buffers.front().count, element_bytes, buffers.size(), 1);
  const std::size_t traffic = buffers.size() * buffers.front().count * element_bytes;
  std::vector<BufferView> views(buffers.begin(), buffers.end());
  run(group_, blocks, traffic, [views = std::move(views), root](const Blocks::Block& block) {
    for (std::size_t d = 0; d < views.size(); ++d) {
      if (d != root) copy(views[d], block.begin, views[root], block.begin, block.size);
    }
  });
}

}  // namespace paceline
