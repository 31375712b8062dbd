// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include <paceline/comm/communicator.hpp>

namespace paceline::internal {

/// The work of a Communicator, after it has checked the arguments.
class Collectives {
 public:
  virtual ~Collectives();
  virtual void all_reduce(std::span<const BufferView> buffers, ReduceOp op) = 0;
  virtual void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs, ReduceOp op) = 0;
  virtual void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) = 0;
  virtual void broadcast(std::span<const BufferView> buffers, std::size_t root) = 0;
  virtual void send(const BufferView& input, const BufferView& output, std::size_t source, std::size_t target) = 0;
  virtual void wait() = 0;
  virtual void close() = 0;
  [[nodiscard]] virtual std::string description() const = 0;
};

/// For groups of host devices only.
[[nodiscard]] std::unique_ptr<Collectives> make_host_collectives(const DeviceGroup& group);
/// For groups with at least one asynchronous device.
[[nodiscard]] std::unique_ptr<Collectives> make_async_collectives(const DeviceGroup& group,
                                                                  const CommunicatorOptions& options);

/// output = op over the inputs, all in host memory. The group's workers compute it, or the caller if it is small.
void reduce_on_host(DeviceGroup& group, std::span<const BufferView> inputs, const BufferView& output, ReduceOp op);
/// Every target = source, computed likewise.
void copy_on_host(DeviceGroup& group, const BufferView& source, std::span<const BufferView> targets);

}  // namespace paceline::internal
