// SPDX-License-Identifier: Apache-2.0
//
// Buckets of a group's devices that a test fills and seals, and their sums.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include <paceline/comm/reduce.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/device_group.hpp>

#include "../cpp/comm/reference.hpp"
#include "fake_cuda.hpp"
#include "interrupts.hpp"
#include "queued_steps.hpp"

namespace paceline {

/// Large enough to be cut into slices, and a tail that is not a whole number of them.
inline constexpr std::size_t kCounts[] = {90'000, 3, 70'001};

/// Rounds to the type, if there is one.
inline void round_to(std::vector<float>& values, std::optional<DType> type) {
  if (!type.has_value()) return;
  const int exponent_bits = *type == DType::float16 ? 5 : 8;
  for (float& value : values) {
    const std::uint16_t bits = reference::half_bits(value, exponent_bits, 15 - exponent_bits);
    value = reference::half_value(bits, exponent_bits, 15 - exponent_bits);
  }
}

/// The devices' buckets, in memory that stays, and the sums.
class Buckets {
 public:
  Buckets(const DeviceGroup& group, const DeviceQueueOptions& options) : group_(group), queues(group, options) {
    for (const DeviceId d : group.ids()) {
      auto& mine = buckets_.emplace_back();
      AsyncDevice& maker = queues.maker(queues.space_of(d));
      for (const std::size_t count : kCounts) {
        const std::size_t bytes = count * sizeof(float);
        mine.push_back(queues.stream(d) != nullptr ? maker.allocate(bytes, *queues.stream(d))
                                                   : maker.allocate_pinned(bytes));
      }
    }
    AsyncDevice& home = queues.maker(queues.home_space());
    for (const std::size_t count : kCounts) {
      sums_.push_back(home.allocate(count * sizeof(float), queues.home_stream()));
      results.push_back(home.allocate_pinned(count * sizeof(float)));
    }
  }
  ~Buckets() {
    try {
      queues.drain();
    } catch (const Interrupt&) {
    }
    for (const DeviceId d : group_.ids()) {
      if (queues.stream(d) == nullptr) buckets_[d.number()].clear();
    }
    for (cudaEvent_t event : marks_) cudaEventDestroy(event);
  }

  void begin(const std::vector<bool>& takes_part = {}) {
    times = queues.begin_step({}, takes_part);
    std::vector<BufferView> outputs;
    for (std::size_t k = 0; k < sums_.size(); ++k) outputs.push_back({sums_[k]->data(), kCounts[k], DType::float32});
    queues.expect(outputs, 1.0);
  }

  [[nodiscard]] BufferView view(DeviceId d, std::size_t k) const {
    return {buckets_[d.number()][k]->data(), kCounts[k], DType::float32};
  }

  void fill(DeviceId d, std::size_t k, std::uint32_t seed) {
    const Write one{static_cast<float*>(buckets_[d.number()][k]->data()), kCounts[k], seed};
    if (queues.stream(d) == nullptr) return write(one);
    ASSERT_EQ(cudaSetDevice(group_.device(d).index), cudaSuccess);
    launch(&write_kernel, *queues.stream(d), one);
  }

  /// Records an event of the caller behind the device's work so far, as a graph would. Null on the host.
  NativeEvent mark(DeviceId d) {
    if (queues.stream(d) == nullptr) return nullptr;
    cudaEvent_t& event = marks_.emplace_back();
    EXPECT_EQ(cudaSetDevice(group_.device(d).index), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, queues.stream(d)->native()), cudaSuccess);
    return event;
  }

  void deliver(DeviceId d, const std::vector<bool>& sealed) {
    std::vector<BufferView> parts;
    for (std::size_t k = 0; k < std::size(kCounts); ++k) parts.push_back(sealed[k] ? BufferView{} : view(d, k));
    queues.deliver(d, parts);
  }

  void end() {
    queues.reduce();
    for (std::size_t k = 0; k < sums_.size(); ++k) {
      queues.home_stream().copy(results[k]->data(), sums_[k]->data(), kCounts[k] * sizeof(float));
    }
    queues.end_step();
  }

  /// The sums of what these seeds give, in the order of the devices, to the bit. `travels`: between GPUs.
  void expect_sums(const std::vector<std::vector<std::uint32_t>>& seeds, std::optional<DType> travels = std::nullopt) {
    times->wait();
    if (queues.on_host(1) || queues.space_count() == 1) travels.reset();  // there is one GPU
    for (std::size_t k = 0; k < std::size(kCounts); ++k) {
      std::vector<std::vector<float>> parts;
      std::vector<const void*> inputs;
      for (const std::vector<std::uint32_t>& device : seeds) {
        if (device.empty()) continue;  // had no work
        parts.emplace_back(kCounts[k]);
        write({parts.back().data(), kCounts[k], device[k]});
        round_to(parts.back(), travels);
      }
      for (const std::vector<float>& part : parts) inputs.push_back(part.data());
      std::vector<float> sum(kCounts[k]);
      reduce_block(inputs, sum.data(), kCounts[k], DType::float32, ReduceOp::sum);
      round_to(sum, travels);
      ASSERT_EQ(std::memcmp(sum.data(), results[k]->data(), kCounts[k] * sizeof(float)), 0) << "bucket " << k;
    }
  }

 private:
  DeviceGroup group_;
  std::vector<std::vector<std::unique_ptr<Buffer>>> buckets_;
  std::vector<std::unique_ptr<Buffer>> sums_;
  std::vector<cudaEvent_t> marks_;

 public:
  DeviceQueues queues;
  std::vector<std::unique_ptr<Buffer>> results;
  std::shared_ptr<const StepTimes> times;
};

}  // namespace paceline
