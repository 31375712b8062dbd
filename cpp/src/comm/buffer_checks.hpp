// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/reduce.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline::internal {

/// The buffers of one argument of a collective, with the names for messages.
struct Argument {
  std::string_view call;  ///< "all_reduce"
  std::string_view name;  ///< "buffers"
  std::span<const BufferView> views;
};

/// Each check throws an InvalidArgument that names the call and the buffer, and says what is wrong and what to do.
void check_one_per_device(const Argument& argument, const DeviceGroup& group);
/// All buffers have a known type, memory, and the type and count of the first buffer.
void check_alike(const Argument& argument);
/// whole[0].count == parts[0].count * part_count, and one type.
void check_parts(const Argument& whole, const Argument& parts, std::size_t part_count);
/// No two buffers overlap.
void check_disjoint(const Argument& argument);
/// parts[d] overlaps none of `whole`, except as exactly the d-th part of one.
void check_disjoint_or_own_part(const Argument& whole, const Argument& parts);
void check_op(std::string_view call, ReduceOp op);

}  // namespace paceline::internal
