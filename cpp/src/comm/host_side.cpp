// SPDX-License-Identifier: Apache-2.0
#include "comm/host_side.hpp"

#include <cstring>
#include <vector>

#include "comm/collectives.hpp"

namespace paceline::internal {
namespace {

constexpr std::size_t kMostRepeats = 64;  // a kernel takes a limited number of inputs

}  // namespace

HostPart HostSide::bring_in(std::span<const BufferView> inputs, ReduceOp op) {
  if (empty()) return {};
  const BufferView& like = inputs.front();
  const std::size_t bytes = like.count * size_of(like.dtype);
  std::vector<BufferView> views;
  for (const std::size_t d : memory_.host_devices()) views.push_back(inputs[d]);
  const BufferView staged{memory_.staging(kIn, bytes), like.count, like.dtype};
  const bool half = like.dtype == DType::float16 || like.dtype == DType::bfloat16;
  const bool as_mean = op == ReduceOp::mean && half && views.size() <= kMostRepeats;
  reduce_on_host(group_, views, staged, op == ReduceOp::mean && !as_mean ? ReduceOp::sum : op);
  Space& home = memory_.home();
  void* const landed = MemorySpaces::reserve(home, home.landing, bytes);
  home.endpoint.stream->copy(landed, staged.data, bytes);
  return {landed, as_mean ? views.size() : 1};
}

const void* HostSide::stage(const BufferView& input, std::size_t bytes_before, std::size_t all_bytes) {
  char* const place = static_cast<char*>(memory_.staging(kIn, all_bytes)) + bytes_before;
  return std::memcpy(place, input.data, input.count * size_of(input.dtype));
}

void HostSide::take_out(const void* from, std::size_t bytes, std::size_t bytes_before, std::size_t all_bytes) {
  if (empty()) return;
  memory_.home().endpoint.stream->copy(static_cast<char*>(memory_.staging(kOut, all_bytes)) + bytes_before, from,
                                       bytes);
}

void HostSide::take_out(const Space& space, const BufferView& from) {
  const std::size_t bytes = from.count * size_of(from.dtype);
  space.endpoint.stream->copy(memory_.staging(kOut, bytes), from.data, bytes);
}

void HostSide::give(const BufferView& whole, std::size_t begin, const BufferView& target) {
  const std::size_t size = size_of(whole.dtype);
  char* const result = static_cast<char*>(memory_.staging(kOut, whole.count * size));
  copy_on_host(group_, {result + begin * size, target.count, whole.dtype}, {&target, 1});
}

void HostSide::give_all(const BufferView& whole, std::span<const BufferView> buffers, std::size_t except) {
  if (empty()) return;
  std::vector<BufferView> targets;
  for (const std::size_t d : memory_.host_devices()) {
    if (d != except) targets.push_back(buffers[d]);
  }
  void* const result = memory_.staging(kOut, whole.count * size_of(whole.dtype));
  copy_on_host(group_, {result, whole.count, whole.dtype}, targets);
}

}  // namespace paceline::internal
