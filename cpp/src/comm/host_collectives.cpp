// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <paceline/error.hpp>

#include "comm/block_task.hpp"
#include "comm/collectives.hpp"
#include "comm/reduce_kernels.hpp"

namespace paceline::internal {
namespace {

// Bytes of one block over all buffers: the smallest second-level cache in use (256 KiB). Only copies to several buffers
// read anything twice, and the cache still holds it then.
constexpr std::size_t kBlockTraffic = 256 * 1024;
// A block has at least a page of each buffer, so that hardware prefetching starts and a claim (well under 1 us) is
// cheap compared with its block. It has at most 64 KiB, so that the last block is short and the others do not wait long
// for its worker. (With 32 KiB it is 5 to 10 % slower, because prefetching starts anew with each block.)
constexpr std::size_t kMinBlockBytes = 4 * 1024;
constexpr std::size_t kMaxBlockBytes = 64 * 1024;
// Up to this traffic the caller does the work. A parked worker needs 10 to 50 us to wake, and one core moves a few
// hundred KiB in that time.
constexpr std::size_t kInlineTraffic = 256 * 1024;

char* at(const BufferView& view, std::size_t element) {
  return static_cast<char*>(view.data) + element * size_of(view.dtype);
}

// Cuts [0, count) of every buffer into blocks of one size (the last may be shorter). The whole is done `repeats` times.
struct Blocks {
  std::size_t count;
  std::size_t block_elements;
  std::size_t blocks_per_repeat;
  std::size_t block_count;

  // streams: the number of buffers that a block touches.
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

// Inputs or outputs in the form that reduce_block takes, without an allocation for up to 64.
template <class T>
class Pointers {
 public:
  Pointers(const std::vector<BufferView>& views, std::size_t element) {
    T** to = inline_;
    if (views.size() > std::size(inline_)) {
      many_.resize(views.size());
      to = many_.data();
    }
    for (std::size_t i = 0; i < views.size(); ++i) to[i] = at(views[i], element);
    span_ = {to, views.size()};
  }
  Pointers(const Pointers&) = delete;
  Pointers& operator=(const Pointers&) = delete;
  [[nodiscard]] std::span<T* const> span() const { return span_; }

 private:
  T* inline_[64];
  std::vector<T*> many_;
  std::span<T* const> span_;
};

void copy(const BufferView& to, std::size_t to_element, const BufferView& from, std::size_t from_element,
          std::size_t count) {
  char* target = at(to, to_element);
  const char* source = at(from, from_element);
  if (target != source) std::memcpy(target, source, count * size_of(to.dtype));
}

class HostCollectives final : public Collectives {
 public:
  explicit HostCollectives(DeviceGroup group) : group_(std::move(group)) {}

  void all_reduce(std::span<const BufferView> buffers, ReduceOp op) override {
    const DType dtype = buffers.front().dtype;
    const Blocks blocks(buffers.front().count, size_of(dtype), buffers.size(), 1);
    const std::size_t traffic = 2 * buffers.size() * buffers.front().count * size_of(dtype);
    std::vector<BufferView> views(buffers.begin(), buffers.end());
    run(group_, blocks, traffic, [views = std::move(views), dtype, op](const Blocks::Block& block) {
      const Pointers<const void> inputs(views, block.begin);
      const Pointers<void> outputs(views, block.begin);
      reduce_block_to_all(inputs.span(), outputs.span(), block.size, dtype, op);
    });
  }

  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs, ReduceOp op) override {
    const DType dtype = inputs.front().dtype;
    const std::size_t part_size = outputs.front().count;
    const Blocks blocks(part_size, size_of(dtype), inputs.size() + 1, outputs.size());
    const std::size_t traffic = (inputs.size() + 1) * inputs.front().count * size_of(dtype);
    std::vector<BufferView> from(inputs.begin(), inputs.end());
    std::vector<BufferView> to(outputs.begin(), outputs.end());
    run(group_, blocks, traffic,
        [from = std::move(from), to = std::move(to), part_size, dtype, op](const Blocks::Block& block) {
          const Pointers<const void> pointers(from, block.repeat * part_size + block.begin);
          reduce_block(pointers.span(), at(to[block.repeat], block.begin), block.size, dtype, op);
        });
  }

  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) override {
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

  void broadcast(std::span<const BufferView> buffers, std::size_t root) override {
    copy_on_host(group_, buffers[root], buffers);
  }

  void send(const BufferView& input, const BufferView& output, std::size_t, std::size_t) override {
    copy_on_host(group_, input, {&output, 1});
  }

  void wait() override {}  // every call waits for its own work
  void close() override {}
  [[nodiscard]] std::string description() const override { return "the host's memory"; }

 private:
  DeviceGroup group_;
};

}  // namespace

std::unique_ptr<Collectives> make_host_collectives(const DeviceGroup& group) {
  const Device& first = group.devices().front();
  for (const Device& device : group.devices()) {
    if (device.memory_space == first.memory_space) continue;
    throw InvalidArgument(fmt::format("Communicator: {} is in memory space '{}' and {} in '{}'; host collectives need "
                                      "one space: make a group of devices that share one",
                                      first.name, first.memory_space, device.name, device.memory_space),
                          device.name);
  }
  return std::make_unique<HostCollectives>(group);
}

void reduce_on_host(DeviceGroup& group, std::span<const BufferView> inputs, const BufferView& output, ReduceOp op) {
  const Blocks blocks(output.count, size_of(output.dtype), inputs.size() + 1, 1);
  const std::size_t traffic = (inputs.size() + 1) * output.count * size_of(output.dtype);
  std::vector<BufferView> views(inputs.begin(), inputs.end());
  run(group, blocks, traffic, [views = std::move(views), output, op](const Blocks::Block& block) {
    const Pointers<const void> pointers(views, block.begin);
    reduce_block(pointers.span(), at(output, block.begin), block.size, output.dtype, op);
  });
}

void copy_on_host(DeviceGroup& group, const BufferView& source, std::span<const BufferView> targets) {
  const std::size_t element_bytes = size_of(source.dtype);
  const Blocks blocks(source.count, element_bytes, targets.size() + 1, 1);
  const std::size_t traffic = (targets.size() + 1) * source.count * element_bytes;
  std::vector<BufferView> views(targets.begin(), targets.end());
  run(group, blocks, traffic, [views = std::move(views), source](const Blocks::Block& block) {
    for (const BufferView& view : views) copy(view, block.begin, source, block.begin, block.size);
  });
}

}  // namespace paceline::internal
