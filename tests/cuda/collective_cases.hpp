// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>

#include "../cpp/comm/reference.hpp"

namespace paceline {

struct Box {
  const char* name;
  int gpus;
  std::vector<std::string> devices;
  Transport transport = Transport::automatic;

  [[nodiscard]] CommunicatorOptions options() const { return {.transport = transport, .warm_up_bytes = 64}; }
};

inline void PrintTo(const Box& box, std::ostream* out) { *out << box.name; }

inline std::vector<Box> boxes() {
  const std::vector<std::string> everything{"host:0", "cuda:0/0", "cuda:0/1", "cuda:1",
                                            "host:1", "cuda:2/0", "cuda:2/1"};
  const std::vector<std::string> two_by_two{"cuda:1/0", "cuda:1/1", "cuda:0/0", "cuda:0/1"};
  return {{"TwoPartitions", 1, {"cuda:0/0", "cuda:0/1"}},
          {"TwoGpus", 2, {"cuda:0", "cuda:1"}},
          {"TwoGpusByCopies", 2, {"cuda:0", "cuda:1"}, Transport::copies},
          {"ThreeGpusByCopies", 3, {"cuda:2", "cuda:0", "cuda:1"}, Transport::copies},
          {"FourGpus", 4, {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}},
          {"TwoPartsAndAGpu", 2, {"cuda:0/0", "cuda:0/1", "cuda:1"}},
          {"TwoByTwo", 2, two_by_two},
          {"TwoByTwoByCopies", 2, two_by_two, Transport::copies},
          {"GpuAndHost", 1, {"host:0", "cuda:0", "host:1"}},
          {"Everything", 3, everything},
          {"EverythingByCopies", 3, everything, Transport::copies}};
}

/// The bits of elements, in whole words: what an array of the tests holds.
using Words = std::vector<float>;

inline std::size_t words_of(std::size_t count, DType dtype) { return (count * size_of(dtype) + 3) / 4; }

inline double number_of(std::uint64_t bits, DType dtype) {
  if (dtype == DType::float32) return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  if (dtype == DType::float16) return reference::half_value(static_cast<std::uint16_t>(bits), 5, 10);
  if (dtype == DType::bfloat16) return reference::half_value(static_cast<std::uint16_t>(bits), 8, 7);
  return std::bit_cast<double>(bits);
}

/// Whole numbers from -8 to 15, whose sums every type holds, and now and then a NaN.
inline Words some_elements(std::size_t count, DType dtype, std::mt19937_64& random) {
  Words words(words_of(count, dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const auto integer = static_cast<std::int64_t>(random() % 24) - 8;
    const auto number = random() % 16 == 0 ? std::nanf("") : static_cast<float>(integer);
    auto bits = static_cast<std::uint64_t>(integer);
    if (dtype == DType::float32) bits = std::bit_cast<std::uint32_t>(number);
    if (dtype == DType::float64) bits = std::bit_cast<std::uint64_t>(static_cast<double>(number));
    if (dtype == DType::float16) bits = reference::half_bits(number, 5, 10);
    if (dtype == DType::bfloat16) bits = reference::half_bits(number, 8, 7);
    std::memcpy(reinterpret_cast<char*>(words.data()) + i * size_of(dtype), &bits, size_of(dtype));
  }
  return words;
}

/// One call, drawn at random, and what it has to write.
class Call {
 public:
  enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast, send };

  Call(std::size_t devices, std::mt19937_64& random)
      : kind(static_cast<Kind>(random() % 5)),
        op(reference::kOps[random() % std::size(reference::kOps)]),
        dtype(reference::kDTypes[random() % std::size(reference::kDTypes)]),
        part(1 + random() % 9),
        root(random() % devices),
        target(random() % devices),
        in_count(kind == Kind::reduce_scatter ? part * devices : part),
        out_count(kind == Kind::all_gather ? part * devices : part) {}

  [[nodiscard]] bool in_place() const { return kind == Kind::all_reduce || kind == Kind::broadcast; }

  void run(Communicator& communicator, std::vector<BufferView> in, std::vector<BufferView> out) const {
    const auto retype = [this](std::vector<BufferView>& views, std::size_t count) {
      for (BufferView& view : views) view = {view.data, count, dtype, view.stream};
    };
    retype(in, in_count);
    retype(out, out_count);
    if (kind == Kind::all_reduce) communicator.all_reduce(in, op);
    if (kind == Kind::reduce_scatter) communicator.reduce_scatter(in, out, op);
    if (kind == Kind::all_gather) communicator.all_gather(in, out);
    if (kind == Kind::broadcast) communicator.broadcast(in, root);
    if (kind == Kind::send) communicator.send(in[root], out[target], root, target);
  }

  /// Whether element i of a device's result is right, by the plain definition. A mean may be rounded in every stage.
  [[nodiscard]] bool right(std::size_t device, std::size_t i, const Words& result, const std::vector<Words>& in) const {
    std::vector<const void*> inputs;
    for (const Words& one : in) inputs.push_back(one.data());
    const std::uint64_t bits = reference::bits_of(result.data(), i, dtype);
    if (kind == Kind::all_gather) return bits == reference::bits_of(inputs[i / part], i % part, dtype);
    if (kind == Kind::send && device != target) return true;  // it has no part in it
    if (kind == Kind::broadcast || kind == Kind::send) return bits == reference::bits_of(inputs[root], i, dtype);
    const std::size_t element = kind == Kind::reduce_scatter ? device * part + i : i;
    const std::uint64_t expected = reference::reduced_bits(inputs, element, dtype, op);
    if (reference::same(bits, expected, dtype)) return true;
    if (op != ReduceOp::mean || dtype == DType::int32 || dtype == DType::int64) return false;
    const double tolerance = dtype == DType::float16 ? 0.05 : dtype == DType::bfloat16 ? 0.4 : 1e-5;
    return std::fabs(number_of(bits, dtype) - number_of(expected, dtype)) < tolerance;
  }

  [[nodiscard]] std::string name() const {
    static const char* const kinds[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "send"};
    return std::string(kinds[static_cast<std::size_t>(kind)]) + ", " + name_of(op) + " of " + name_of(dtype);
  }

  const Kind kind;
  const ReduceOp op;
  const DType dtype;
  const std::size_t part;
  const std::size_t root;
  const std::size_t target;
  const std::size_t in_count;
  const std::size_t out_count;
};

}  // namespace paceline
