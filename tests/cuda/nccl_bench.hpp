// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>

#include "nccl_machine.hpp"
#include "orders.hpp"

namespace paceline {

inline DeviceGroup gpus(int count) {
  std::vector<std::string> names;
  for (int d = 0; d < count; ++d) names.push_back("cuda:" + std::to_string(d));
  return group_of(names);
}

/// A group of GPUs with an array each, and one more call to see that all is well again.
struct Bench {
  explicit Bench(int count, std::chrono::nanoseconds timeout = std::chrono::seconds(30), std::size_t warm_up_bytes = 0)
      : group(gpus(count)),
        communicator(group, {.transport = Transport::nccl, .timeout = timeout, .warm_up_bytes = warm_up_bytes}),
        arrays(group, 4),
        ones(4, 1.0F) {}

  void reduce() {
    for (std::size_t d = 0; d < group.size(); ++d) arrays.fill(d, ones);
    communicator.all_reduce(arrays.views());
  }

  void expect_right() {
    reduce();
    std::vector<std::vector<float>> after(group.size());
    for (std::size_t d = 0; d < group.size(); ++d) arrays.read(d, after[d]);
    communicator.wait();
    arrays.wait();
    for (const auto& each : after) ASSERT_EQ(each, std::vector<float>(4, static_cast<float>(group.size())));
  }

  DeviceGroup group;
  Communicator communicator;
  GpuArrays arrays;
  std::vector<float> ones;
};

}  // namespace paceline
