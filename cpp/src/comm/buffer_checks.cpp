// SPDX-License-Identifier: Apache-2.0
#include "comm/buffer_checks.hpp"

#include <cstdint>
#include <string>

#include <fmt/format.h>

#include <paceline/error.hpp>

#include "plural.hpp"

namespace paceline::internal {
namespace {

std::string label(const Argument& argument, std::size_t index) { return fmt::format("{}[{}]", argument.name, index); }

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

}  // namespace

void check_one_per_device(const Argument& argument, const DeviceGroup& group) {
  if (argument.views.size() == group.size()) return;
  throw InvalidArgument(
      fmt::format("{}: {} has {} for a group of {} ({} to {}); pass one per device, in the "
                  "order of the group",
                  argument.call, argument.name, plural(argument.views.size(), "buffer"), plural(group.size(), "device"),
                  group.devices().front().name, group.devices().back().name));
}

void check_alike(const Argument& argument) {
  const BufferView& first = argument.views.front();
  for (std::size_t i = 0; i < argument.views.size(); ++i) {
    const BufferView& view = argument.views[i];
    if (size_of(view.dtype) == 0) {
      throw InvalidArgument(fmt::format("{}: {} has an unknown element type ({})", argument.call, label(argument, i),
                                        static_cast<int>(view.dtype)));
    }
    if (view.dtype != first.dtype) {
      throw InvalidArgument(fmt::format("{}: {} is {}, but {} is {}; all must be of one type: convert one of them",
                                        argument.call, label(argument, i), name_of(view.dtype), label(argument, 0),
                                        name_of(first.dtype)));
    }
    if (view.count != first.count) {
      throw InvalidArgument(fmt::format("{}: {} has {}, but {} has {}; all must be of one size", argument.call,
                                        label(argument, i), plural(view.count, "element"), label(argument, 0),
                                        first.count));
    }
    if (view.count == 0) continue;
    if (view.data == nullptr) {
      throw InvalidArgument(fmt::format("{}: {} has {} but no memory (null)", argument.call, label(argument, i),
                                        plural(view.count, "element")));
    }
    const std::uintptr_t room = UINTPTR_MAX - reinterpret_cast<std::uintptr_t>(view.data);
    if (view.count > room / size_of(view.dtype)) {
      throw InvalidArgument(fmt::format("{}: {} claims {} elements, more than there are addresses", argument.call,
                                        label(argument, i), view.count));
    }
  }
}

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

void check_disjoint_or_own_part(const Argument& whole, const Argument& parts) {
  for (std::size_t d = 0; d < parts.views.size(); ++d) {
    const BufferView& part = parts.views[d];
    for (std::size_t w = 0; w < whole.views.size(); ++w) {
      if (!overlap(part, whole.views[w])) continue;
      const std::uintptr_t own_part = range_of(whole.views[w]).begin + d * part.count * size_of(part.dtype);
      if (range_of(part).begin == own_part) continue;
      throw InvalidArgument(
          fmt::format("{}: {} overlaps {} without being its part {}; use separate memory or exactly "
                      "that part",
                      whole.call, label(parts, d), label(whole, w), d));
    }
  }
}

void check_op(std::string_view call, ReduceOp op) {
  if (static_cast<std::size_t>(op) <= static_cast<std::size_t>(ReduceOp::max)) return;
  throw InvalidArgument(
      fmt::format("{}: unknown operation ({}); use sum, mean, min or max", call, static_cast<int>(op)));
}

}  // namespace paceline::internal
