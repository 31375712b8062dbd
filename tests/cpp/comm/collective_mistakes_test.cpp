// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>

#include "buffers.hpp"
#include "errors.hpp"

namespace paceline {
namespace {

// Expects that `call` reports a mistake with these words and leaves the memory unchanged.
void expect_mistake(Buffers& memory, const std::vector<std::string>& words, const std::function<void()>& call) {
  const Buffers before = memory;
  const auto error = thrown_by<InvalidArgument>(call);
  for (const std::string& word : words) {
    EXPECT_TRUE(says(error, word));
  }
  EXPECT_TRUE(memory == before) << "something was written before the error: " << words.front();
}

TEST(Mistakes, NameTheBufferAndWriteNothing) {
  Communicator communicator(make_group(2));
  for (const std::size_t count : {std::size_t{10}, std::size_t{100000}}) {
    Buffers memory(2, count, DType::float32, 1);
    Buffers other(2, count, DType::float32, 2);
    std::vector<BufferView> views = memory.views();

    expect_mistake(memory, {"all_reduce", "buffers has 1 buffer for a group of 2 devices", "host:0"},
                   [&] { communicator.all_reduce(std::span(views).first(1)); });
    expect_mistake(memory, {"broadcast", "buffers has 0 buffers"}, [&] { communicator.broadcast({}); });

    views[1].count = count - 1;
    expect_mistake(memory, {"all_reduce: buffers[1] has", "elements, but buffers[0] has"},
                   [&] { communicator.all_reduce(views); });
    expect_mistake(memory, {"broadcast: buffers[1]"}, [&] { communicator.broadcast(views); });
    expect_mistake(memory, {"reduce_scatter: inputs[1]"}, [&] { communicator.reduce_scatter(views, other.views()); });
    expect_mistake(memory, {"all_gather: outputs[1]"}, [&] { communicator.all_gather(other.views(), views); });
    views = memory.views();

    views[1].dtype = DType::int32;
    expect_mistake(memory, {"buffers[1] is int32, but buffers[0] is float32", "convert"},
                   [&] { communicator.all_reduce(views); });
    views[0].dtype = views[1].dtype = static_cast<DType>(77);
    expect_mistake(memory, {"buffers[0] has an unknown element type (77)"}, [&] { communicator.all_reduce(views); });
    views = memory.views();

    views[1].data = nullptr;
    expect_mistake(memory, {"buffers[1]", "no memory"}, [&] { communicator.all_reduce(views); });
    views = memory.views();
    views[0].count = views[1].count = SIZE_MAX / 2;
    expect_mistake(memory, {"buffers[0] claims"}, [&] { communicator.all_reduce(views); });
    views = memory.views();

    views[1] = views[0];
    expect_mistake(memory, {"buffers[0] and buffers[1] overlap", "copy"}, [&] { communicator.all_reduce(views); });
    views[1].data = static_cast<char*>(views[0].data) + count * 4 - 1;
    views[0].count = views[1].count = count / 2 + 1;
    views[1].data = static_cast<char*>(views[0].data) + count / 2 * 4;
    expect_mistake(memory, {"buffers[0] and buffers[1] overlap"}, [&] { communicator.broadcast(views); });
    views = memory.views();

    expect_mistake(memory, {"root is 2", "0 to 1"}, [&] { communicator.broadcast(views, 2); });
    expect_mistake(memory, {"send: source is 2", "0 to 1"}, [&] { communicator.send(views[0], views[1], 2, 1); });
    expect_mistake(memory, {"send: target is 2", "0 to 1"}, [&] { communicator.send(views[0], views[1], 0, 2); });
    expect_mistake(memory, {"send: buffers[0] and buffers[1] overlap"},
                   [&] { communicator.send(views[0], views[0], 0, 1); });
    expect_mistake(memory, {"unknown operation (9)"},
                   [&] { communicator.all_reduce(views, static_cast<ReduceOp>(9)); });
  }
}

TEST(Mistakes, InPartsNameBothArgumentsAndWriteNothing) {
  Communicator communicator(make_group(2));
  constexpr std::size_t part = 50000;
  Buffers whole(2, 2 * part, DType::float32, 1);
  Buffers parts(2, part, DType::float32, 2);
  Buffers small(2, part - 1, DType::float32, 2);
  Buffers integers(2, part, DType::int32, 2);

  expect_mistake(small, {"reduce_scatter", "inputs have 100000", "outputs have 49999", "2 times"},
                 [&] { communicator.reduce_scatter(whole.views(), small.views()); });
  expect_mistake(whole, {"all_gather", "outputs have 100000", "inputs have 49999"},
                 [&] { communicator.all_gather(small.views(), whole.views()); });
  expect_mistake(integers, {"inputs are float32, but outputs are int32"},
                 [&] { communicator.reduce_scatter(whole.views(), integers.views()); });

  std::vector<BufferView> twice{parts.view(0), parts.view(0)};
  expect_mistake(parts, {"outputs[0] and outputs[1] overlap"},
                 [&] { communicator.reduce_scatter(whole.views(), twice); });
  // The other device's part of an input, which is still to be read.
  std::vector<BufferView> crossed = parts.views();
  crossed[1] = {whole.view(0).data, part, DType::float32};
  expect_mistake(whole, {"outputs[1] overlaps inputs[0]"},
                 [&] { communicator.reduce_scatter(whole.views(), crossed); });
  expect_mistake(whole, {"inputs[1] overlaps outputs[0]"}, [&] { communicator.all_gather(crossed, whole.views()); });
  crossed[1] = {static_cast<char*>(whole.view(1).data) + part * 4 - 4, part, DType::float32};  // off by one element
  expect_mistake(whole, {"outputs[1] overlaps inputs[1]"},
                 [&] { communicator.reduce_scatter(whole.views(), crossed); });
}

}  // namespace
}  // namespace paceline
