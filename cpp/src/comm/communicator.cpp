// SPDX-License-Identifier: Apache-2.0
#include <paceline/comm/communicator.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <paceline/error.hpp>

#include "comm/collectives.hpp"
#include "plural.hpp"

namespace paceline {
namespace internal {

Collectives::~Collectives() = default;

}  // namespace internal

namespace {

/// The buffers of one argument of a collective, with the names for messages.
struct Argument {
  std::string_view call;  ///< "all_reduce"
  std::string_view name;  ///< "buffers"
  std::span<const BufferView> views;
};

std::string label(const Argument& argument, std::size_t index) { return fmt::format("{}[{}]", argument.name, index); }

/// `reason` goes on about one buffer of the argument.
template <class... Facts>
[[noreturn]] void refuse(const Argument& argument, std::size_t index, fmt::format_string<Facts...> reason,
                         Facts&&... facts) {
  throw InvalidArgument(fmt::format("{}: {} {}", argument.call, label(argument, index),
                                    fmt::format(reason, std::forward<Facts>(facts)...)));
}

// [begin, end) as numbers: comparing pointers into different objects is not defined.
struct Range {
  std::uintptr_t begin;
  std::uintptr_t end;
};

Range range_of(const BufferView& view) {
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  return {begin, begin + view.count * size_of(view.dtype)};
}

bool overlap(const BufferView& a, const BufferView& b) {
  const Range x = range_of(a);
  const Range y = range_of(b);
  return x.begin < y.end && y.begin < x.end;
}

/// Each check throws an InvalidArgument that names the call and the buffer, and says what is wrong and what to do.
void check_one_per_device(const Argument& argument, const DeviceGroup& group) {
  if (argument.views.size() == group.size()) return;
  throw InvalidArgument(
      fmt::format("{}: {} has {} for a group of {} ({} to {}); pass one per device, in the "
                  "order of the group",
                  argument.call, argument.name, plural(argument.views.size(), "buffer"), plural(group.size(), "device"),
                  group.devices().front().name, group.devices().back().name));
}

/// All buffers have a known type, memory, and the type and count of the first buffer.
void check_alike(const Argument& argument) {
  const BufferView& first = argument.views.front();
  for (std::size_t i = 0; i < argument.views.size(); ++i) {
    const BufferView& view = argument.views[i];
    if (size_of(view.dtype) == 0) {
      refuse(argument, i, "has an unknown element type ({})", static_cast<int>(view.dtype));
    }
    if (view.dtype != first.dtype) {
      refuse(argument, i, "is {}, but {} is {}; all must be of one type: convert one of them", name_of(view.dtype),
             label(argument, 0), name_of(first.dtype));
    }
    if (view.count != first.count) {
      refuse(argument, i, "has {}, but {} has {}; all must be of one size", plural(view.count, "element"),
             label(argument, 0), first.count);
    }
    if (view.count == 0) continue;
    if (view.data == nullptr) refuse(argument, i, "has {} but no memory (null)", plural(view.count, "element"));
    const std::uintptr_t room = UINTPTR_MAX - reinterpret_cast<std::uintptr_t>(view.data);
    if (view.count > room / size_of(view.dtype)) {
      refuse(argument, i, "claims {} elements, more than there are addresses", view.count);
    }
  }
}

/// whole[0].count == parts[0].count * part_count, and one type.
void check_parts(const Argument& whole, const Argument& parts, std::size_t part_count) {
  const BufferView& total = whole.views.front();
  const BufferView& part = parts.views.front();
  if (total.dtype != part.dtype) {
    throw InvalidArgument(fmt::format("{}: {} are {}, but {} are {}; all must be of one type: convert one of them",
                                      whole.call, whole.name, name_of(total.dtype), parts.name, name_of(part.dtype)));
  }
  if (total.count % part_count != 0 || total.count / part_count != part.count) {
    throw InvalidArgument(
        fmt::format("{}: {} have {} each and {} have {}; with {} the first must be "
                    "{} times the second",
                    whole.call, whole.name, plural(total.count, "element"), parts.name, part.count,
                    plural(part_count, "device"), part_count));
  }
}

/// No two buffers overlap.
void check_disjoint(const Argument& argument) {
  for (std::size_t i = 1; i < argument.views.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!overlap(argument.views[j], argument.views[i])) continue;
      throw InvalidArgument(
          fmt::format("{}: {} and {} overlap in memory; each device needs a buffer of its own: copy "
                      "one of them",
                      argument.call, label(argument, j), label(argument, i)));
    }
  }
}

/// parts[d] overlaps none of `whole`, except as exactly the d-th part of one.
void check_disjoint_or_own_part(const Argument& whole, const Argument& parts) {
  for (std::size_t d = 0; d < parts.views.size(); ++d) {
    const BufferView& part = parts.views[d];
    for (std::size_t w = 0; w < whole.views.size(); ++w) {
      if (!overlap(part, whole.views[w])) continue;
      const std::uintptr_t own_part = range_of(whole.views[w]).begin + d * part.count * size_of(part.dtype);
      if (range_of(part).begin == own_part) continue;
      refuse(parts, d, "overlaps {} without being its part {}; use separate memory or exactly that part",
             label(whole, w), d);
    }
  }
}

void check_op(std::string_view call, ReduceOp op) {
  if (static_cast<std::size_t>(op) <= static_cast<std::size_t>(ReduceOp::max)) return;
  throw InvalidArgument(
      fmt::format("{}: unknown operation ({}); use sum, mean, min or max", call, static_cast<int>(op)));
}

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
  check_op("all_reduce", op);
  check_one_per_device(argument, group_);
  check_alike(argument);
  check_disjoint(argument);
  check_open("all_reduce", group_);

  if (buffers.size() == 1 || buffers.front().count == 0) return;  // an operation over one value gives that value
  collectives_->all_reduce(buffers, op);
}

void Communicator::reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs,
                                  ReduceOp op) {
  const Argument whole{"reduce_scatter", "inputs", inputs};
  const Argument parts{"reduce_scatter", "outputs", outputs};
  check_op("reduce_scatter", op);
  check_one_per_device(whole, group_);
  check_one_per_device(parts, group_);
  check_alike(whole);
  check_alike(parts);
  check_parts(whole, parts, group_.size());
  check_disjoint(parts);
  check_disjoint_or_own_part(whole, parts);
  check_open("reduce_scatter", group_);

  if (outputs.front().count > 0) collectives_->reduce_scatter(inputs, outputs, op);
}

void Communicator::all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) {
  const Argument parts{"all_gather", "inputs", inputs};
  const Argument whole{"all_gather", "outputs", outputs};
  check_one_per_device(parts, group_);
  check_one_per_device(whole, group_);
  check_alike(parts);
  check_alike(whole);
  check_parts(whole, parts, group_.size());
  check_disjoint(whole);
  check_disjoint_or_own_part(whole, parts);
  check_open("all_gather", group_);

  if (inputs.front().count > 0) collectives_->all_gather(inputs, outputs);
}

void Communicator::broadcast(std::span<const BufferView> buffers, std::size_t root) {
  const Argument argument{"broadcast", "buffers", buffers};
  check_one_per_device(argument, group_);
  check_index("broadcast", "root", root, group_);
  check_alike(argument);
  check_disjoint(argument);
  check_open("broadcast", group_);

  if (buffers.size() == 1 || buffers.front().count == 0) return;
  collectives_->broadcast(buffers, root);
}

void Communicator::send(const BufferView& input, const BufferView& output, std::size_t source, std::size_t target) {
  const BufferView both[] = {input, output};
  const Argument argument{"send", "buffers", both};
  check_index("send", "source", source, group_);
  check_index("send", "target", target, group_);
  check_alike(argument);
  check_disjoint(argument);
  check_open("send", group_);

  if (input.count > 0) collectives_->send(input, output, source, target);
}

void Communicator::wait() { collectives_->wait(); }
void Communicator::close() { collectives_->close(); }
std::string Communicator::description() const { return collectives_->description(); }

}  // namespace paceline
