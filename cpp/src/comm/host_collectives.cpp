// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <paceline/error.hpp>

#include "comm/block_reduction.hpp"
#include "comm/collectives.hpp"

namespace paceline::internal {
namespace {

// Up to this traffic the caller does the work. A parked worker needs 10 to 50 us to wake, and one core moves a few
// hundred KiB in that time.
constexpr std::size_t kInlineTraffic = 256 * 1024;

/// Complete when the last block is done. A worker that comes later finds nothing left, and nobody waits for it.
class BlockTask final : public GroupTask {
 public:
  explicit BlockTask(std::vector<BlockJob> jobs) : blocks_(std::move(jobs)) {}
  void run(DeviceId) noexcept override {
    if (blocks_.work()) wake_caller();
  }
  [[nodiscard]] bool complete() const noexcept override { return blocks_.done(); }

 private:
  BlockReduction blocks_;
};

void run(DeviceGroup& group, std::vector<BlockJob> jobs) {
  std::size_t traffic = 0;
  for (const BlockJob& job : jobs) traffic += (job.inputs.size() + job.outputs.size()) * job.count * size_of(job.dtype);
  if (traffic > kInlineTraffic) {
    group.run(std::make_shared<BlockTask>(std::move(jobs)));
  } else {
    BlockReduction(std::move(jobs)).work();
  }
}

/// The memory of all buffers, from that element on.
template <class Pointer>
std::vector<Pointer> data_of(std::span<const BufferView> views, std::size_t element = 0) {
  std::vector<Pointer> data;
  for (const BufferView& view : views) data.push_back(static_cast<char*>(view.data) + element * size_of(view.dtype));
  return data;
}

class HostCollectives final : public Collectives {
 public:
  explicit HostCollectives(DeviceGroup group) : group_(std::move(group)) {}

  void all_reduce(std::span<const BufferView> buffers, ReduceOp op) override {
    const BufferView& like = buffers.front();
    run(group_, {{data_of<const void*>(buffers), data_of<void*>(buffers), like.count, like.dtype, op}});
  }

  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs, ReduceOp op) override {
    std::vector<BlockJob> jobs;
    for (std::size_t d = 0; d < outputs.size(); ++d) {
      const BufferView& part = outputs[d];
      jobs.push_back({data_of<const void*>(inputs, d * part.count), {part.data}, part.count, part.dtype, op});
    }
    run(group_, std::move(jobs));
  }

  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) override {
    std::vector<BlockJob> jobs;
    for (std::size_t d = 0; d < inputs.size(); ++d) {
      const BufferView& part = inputs[d];
      jobs.push_back({{part.data}, data_of<void*>(outputs, d * part.count), part.count, part.dtype});
    }
    run(group_, std::move(jobs));
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
  run(group, {{data_of<const void*>(inputs), {output.data}, output.count, output.dtype, op}});
}

void copy_on_host(DeviceGroup& group, const BufferView& source, std::span<const BufferView> targets) {
  run(group, {{{source.data}, data_of<void*>(targets), source.count, source.dtype}});
}

}  // namespace paceline::internal
