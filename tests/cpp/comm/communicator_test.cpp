// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/error.hpp>

#include "buffers.hpp"
#include "errors.hpp"
#include "reference.hpp"

namespace paceline {
namespace {

using reference::bits_of;
using reference::kDTypes;
using reference::kOps;

// Equal to the bit, except that any NaN equals any other: which NaN comes out may depend on the bounds of the blocks.
bool same(const void* a, const void* b, std::size_t count, DType dtype) {
  for (std::size_t i = 0; i < count; ++i) {
    if (!reference::same(bits_of(a, i, dtype), bits_of(b, i, dtype), dtype)) return false;
  }
  return true;
}

// From counts that the calling thread reduces alone to many blocks per worker.
constexpr std::size_t kCounts[] = {0, 1, 1000, 40001};

TEST(AllReduce, GivesEveryDeviceTheReducedBuffer) {
  for (const std::size_t devices : {1, 2, 3}) {
    Communicator communicator(make_group(devices));
    for (const DType dtype : kDTypes) {
      for (const ReduceOp op : kOps) {
        for (const std::size_t count : kCounts) {
          Buffers buffers(devices, count, dtype, count + devices);
          Buffers before = buffers;
          std::vector<char> expected(count * size_of(dtype) + 1);
          reduce_block(before.pointers(), expected.data(), count, dtype, op);
          communicator.all_reduce(buffers.views(), op);
          for (std::size_t d = 0; d < devices; ++d) {
            ASSERT_TRUE(same(buffers.view(d).data, expected.data(), count, dtype))
                << name_of(dtype) << " " << name_of(op) << " " << count << " elements, device " << d << " of "
                << devices;
          }
        }
      }
    }
  }
}

TEST(AllReduce, GivesTheSameBitsInEveryRunWhateverTheWorkersDo) {
  constexpr std::size_t count = 200003;
  Buffers expected(2, count, DType::float32, 5);
  const Buffers before = expected;
  Communicator(make_group(2)).all_reduce(expected.views());
  std::atomic<bool> stop{false};
  std::thread disturbance([&] {  // takes a core from one of the workers now and then
    while (!stop.load()) {
      for (int i = 0; i < 20000; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
      std::this_thread::yield();
    }
  });
  Communicator communicator(make_group(2));
  for (int run = 0; run < 50; ++run) {
    Buffers buffers = before;
    communicator.all_reduce(buffers.views());
    EXPECT_TRUE(buffers == expected) << "run " << run;
  }
  stop = true;
  disturbance.join();
}

TEST(Send, CopiesOneDevicesBufferToAnother) {
  Communicator communicator(make_group(3));
  for (const std::size_t count : kCounts) {
    Buffers from(3, count, DType::bfloat16, count);
    Buffers to(3, count, DType::bfloat16, count + 1);
    const Buffers before = to;
    const Buffers kept = from;
    communicator.send(from.view(2), to.view(1), 2, 1);
    EXPECT_TRUE(from == kept) << "the source is only read";
    EXPECT_TRUE(same(to.view(1).data, from.view(2).data, count, DType::bfloat16)) << count;
    Buffers others = before;
    for (const std::size_t d : {0, 2}) {
      EXPECT_TRUE(same(to.view(d).data, others.view(d).data, count, DType::bfloat16)) << "device " << d;
    }
  }
}

TEST(ReduceScatter, GivesEachDeviceItsPartOfTheReducedInputs) {
  for (const std::size_t devices : {1, 2, 3}) {
    Communicator communicator(make_group(devices));
    for (const DType dtype : kDTypes) {
      for (const std::size_t part : kCounts) {
        Buffers inputs(devices, part * devices, dtype, part);
        const Buffers before = inputs;
        Buffers outputs(devices, part, dtype, 1);
        std::vector<char> expected(part * devices * size_of(dtype) + 1);
        reduce_block(inputs.pointers(), expected.data(), part * devices, dtype, ReduceOp::max);
        communicator.reduce_scatter(inputs.views(), outputs.views(), ReduceOp::max);
        const std::size_t bytes = part * size_of(dtype);
        for (std::size_t d = 0; d < devices; ++d) {
          ASSERT_TRUE(same(outputs.view(d).data, expected.data() + d * bytes, part, dtype)) << name_of(dtype) << d;
        }
        EXPECT_TRUE(inputs == before) << "inputs are only read";
      }
    }
  }
}

TEST(ReduceScatter, WorksInPlaceInItsOwnPart) {
  constexpr std::size_t part = 40001;
  Buffers inputs(2, 2 * part, DType::int64, 8);
  std::vector<std::int64_t> expected(2 * part);
  reduce_block(inputs.pointers(), expected.data(), 2 * part, DType::int64, ReduceOp::sum);
  std::vector<BufferView> outputs;
  for (std::size_t d = 0; d < 2; ++d) {
    outputs.push_back({static_cast<char*>(inputs.view(d).data) + d * part * 8, part, DType::int64});
  }
  Communicator(make_group(2)).reduce_scatter(inputs.views(), outputs);
  for (std::size_t d = 0; d < 2; ++d) {
    EXPECT_EQ(std::memcmp(outputs[d].data, expected.data() + d * part, part * 8), 0) << d;
  }
}

TEST(AllGather, GivesEveryDeviceAllInputsOneAfterTheOther) {
  for (const std::size_t devices : {1, 2, 3}) {
    Communicator communicator(make_group(devices));
    for (const std::size_t part : kCounts) {
      Buffers inputs(devices, part, DType::float32, part);
      Buffers outputs(devices, part * devices, DType::float32, 1);
      communicator.all_gather(inputs.views(), outputs.views());
      for (std::size_t d = 0; d < devices; ++d) {
        for (std::size_t i = 0; i < devices; ++i) {
          const char* place = static_cast<const char*>(outputs.view(d).data) + i * part * 4;
          ASSERT_EQ(std::memcmp(place, inputs.view(i).data, part * 4), 0) << part << " " << d << " " << i;
        }
      }
    }
  }
}

TEST(AllGather, WorksInPlaceFromItsOwnPart) {
  constexpr std::size_t part = 100001;
  Buffers outputs(2, 2 * part, DType::float16, 3);
  const Buffers before = outputs;
  std::vector<BufferView> inputs;
  std::vector<std::vector<char>> sources;
  for (std::size_t d = 0; d < 2; ++d) {
    char* own = static_cast<char*>(outputs.view(d).data) + d * part * 2;
    inputs.push_back({own, part, DType::float16});
    sources.emplace_back(own, own + part * 2);
  }
  Communicator(make_group(2)).all_gather(inputs, outputs.views());
  for (std::size_t d = 0; d < 2; ++d) {
    for (std::size_t i = 0; i < 2; ++i) {
      const char* place = static_cast<const char*>(outputs.view(d).data) + i * part * 2;
      EXPECT_EQ(std::memcmp(place, sources[i].data(), part * 2), 0) << d << i;
    }
  }
}

TEST(Broadcast, GivesEveryDeviceTheBufferOfTheRoot) {
  for (const std::size_t devices : {1, 3}) {
    Communicator communicator(make_group(devices));
    for (const std::size_t count : kCounts) {
      for (std::size_t root = 0; root < devices; ++root) {
        Buffers buffers(devices, count, DType::float64, root);
        Buffers before = buffers;
        communicator.broadcast(buffers.views(), root);
        for (std::size_t d = 0; d < devices; ++d) {
          ASSERT_EQ(std::memcmp(buffers.view(d).data, before.view(root).data, count * 8), 0) << count << root << d;
        }
      }
    }
  }
}

TEST(Inputs, MayBeGivenTwiceWhereTheyAreOnlyRead) {
  Communicator communicator(make_group(2));
  const std::int32_t part[] = {1, 2};
  std::int32_t whole[2][4] = {};
  BufferView input{const_cast<std::int32_t*>(part), 2, DType::int32};
  communicator.all_gather(std::vector{input, input},
                          std::vector<BufferView>{{whole[0], 4, DType::int32}, {whole[1], 4, DType::int32}});
  EXPECT_EQ((std::vector<std::int32_t>(whole[1], whole[1] + 4)), (std::vector<std::int32_t>{1, 2, 1, 2}));
}

TEST(Communicator, RefusesDevicesOfSeveralMemorySpaces) {
  std::vector<Device> devices{find_device("host:0"), find_device("host:1")};
  devices[1].memory_space = "elsewhere";
  const auto error = thrown_by<InvalidArgument>([&] { Communicator communicator{DeviceGroup(devices)}; });
  EXPECT_EQ(error.device(), "host:1");
  EXPECT_TRUE(says(error, "elsewhere"));
}

TEST(Communicator, OfAClosedGroupIsUnavailableForMessagesOfEverySize) {
  DeviceGroup group = make_group(2);
  Communicator communicator(group);
  group.close();
  for (const std::size_t count : {1, 100000}) {
    Buffers buffers(2, count, DType::float32, 1);
    const Buffers before = buffers;
    EXPECT_THROW(communicator.all_reduce(buffers.views()), Unavailable);
    EXPECT_THROW(communicator.broadcast(buffers.views()), Unavailable);
    EXPECT_TRUE(buffers == before);
  }
}

TEST(Communicator, OfDifferentGroupsWorkAtTheSameTime) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    callers.emplace_back([seed, &wrong] {
      Communicator communicator(make_group(2));
      for (std::size_t round = 0; round < 20; ++round) {
        Buffers buffers(2, 30000 + round, DType::float32, seed);
        std::vector<char> expected((30000 + round) * 4);
        reduce_block(buffers.pointers(), expected.data(), 30000 + round, DType::float32, ReduceOp::sum);
        communicator.all_reduce(buffers.views());
        for (std::size_t d = 0; d < 2; ++d) {
          if (!same(buffers.view(d).data, expected.data(), 30000 + round, DType::float32)) ++wrong;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

// Complete once the first worker has left. The second worker stays until release().
class HoldSecondWorker final : public GroupTask {
 public:
  void run(DeviceId device) noexcept override {
    if (device == 0) {
      first_done_ = true;
      wake_caller();
    } else {
      held_ = true;
      held_.notify_all();
      released_.wait(false);
    }
  }
  [[nodiscard]] bool complete() const noexcept override { return first_done_ && held_; }
  void wait_until_held() { held_.wait(false); }
  void release() {
    released_ = true;
    released_.notify_all();
  }

 private:
  std::atomic<bool> first_done_{false};
  std::atomic<bool> held_{false};
  std::atomic<bool> released_{false};
};

TEST(Communicator, DoesNotWaitForAWorkerThatHasNotComeIn) {
  DeviceGroup group = make_group(2);
  const auto holding = std::make_shared<HoldSecondWorker>();
  group.submit(holding);
  holding->wait_until_held();
  group.wait(*holding);
  Buffers buffers(2, 300000, DType::float32, 1);
  std::vector<char> expected(300000 * 4);
  reduce_block(buffers.pointers(), expected.data(), 300000, DType::float32, ReduceOp::sum);
  Communicator(group).all_reduce(buffers.views());  // would hang if it needed all workers
  holding->release();
  EXPECT_TRUE(same(buffers.view(1).data, expected.data(), 300000, DType::float32));
}

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
