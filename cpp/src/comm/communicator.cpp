// SPDX-License-Identifier: Apache-2.0
#include <paceline/comm/communicator.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.hpp>

#include "comm/buffer_checks.hpp"
#include "comm/collectives.hpp"
#include "plural.hpp"

namespace paceline {
namespace internal {

Collectives::~Collectives() = default;

}  // namespace internal

namespace {

using internal::Argument;

// Small messages never reach the group, so the group cannot report this itself.
void check_open(const char* call, const DeviceGroup& group) {
  if (group.closed()) throw Unavailable(fmt::format("{}: the device group is closed. Make a new one.", call));
}

void check_index(const char* call, const char* name, std::size_t index, const DeviceGroup& group) {
  if (index < group.size()) return;
  throw InvalidArgument(fmt::format("{}: {} is {}, but the group has {}; use 0 to {}", call, name, index,
                                    plural(group.size(), "device"), group.size() - 1));
}

std::shared_ptr<internal::Collectives> make(const DeviceGroup& group, const CommunicatorOptions& options) {
  const auto on_host = [](const Device& device) { return device.kind == DeviceKind::host; };
  const std::vector<Device>& devices = group.devices();
  if (std::all_of(devices.begin(), devices.end(), on_host)) return internal::make_host_collectives(group);
  return internal::make_async_collectives(group, options);
}

}  // namespace

Communicator::Communicator(DeviceGroup group, const CommunicatorOptions& options)
    : group_(std::move(group)), collectives_(make(group_, options)) {}

void Communicator::all_reduce(std::span<const BufferView> buffers, ReduceOp op) {
  const Argument argument{"all_reduce", "buffers", buffers};
  internal::check_op("all_reduce", op);
  internal::check_one_per_device(argument, group_);
  internal::check_alike(argument);
  internal::check_disjoint(argument);
  check_open("all_reduce", group_);

  if (buffers.size() == 1 || buffers.front().count == 0) return;  // an operation over one value gives that value
  collectives_->all_reduce(buffers, op);
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

  if (outputs.front().count > 0) collectives_->reduce_scatter(inputs, outputs, op);
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

  if (inputs.front().count > 0) collectives_->all_gather(inputs, outputs);
}

void Communicator::broadcast(std::span<const BufferView> buffers, std::size_t root) {
  const Argument argument{"broadcast", "buffers", buffers};
  internal::check_one_per_device(argument, group_);
  check_index("broadcast", "root", root, group_);
  internal::check_alike(argument);
  internal::check_disjoint(argument);
  check_open("broadcast", group_);

  if (buffers.size() == 1 || buffers.front().count == 0) return;
  collectives_->broadcast(buffers, root);
}

void Communicator::send(const BufferView& input, const BufferView& output, std::size_t source, std::size_t target) {
  const BufferView both[] = {input, output};
  const Argument argument{"send", "buffers", both};
  check_index("send", "source", source, group_);
  check_index("send", "target", target, group_);
  internal::check_alike(argument);
  internal::check_disjoint(argument);
  check_open("send", group_);

  if (input.count > 0) collectives_->send(input, output, source, target);
}

void Communicator::wait() { collectives_->wait(); }
void Communicator::close() { collectives_->close(); }
std::string Communicator::description() const { return collectives_->description(); }

}  // namespace paceline
