// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <ostream>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/partition.hpp>

#include "cuda_backend.hpp"

namespace paceline::gpu_test {

/// What a test trains on: the first GPU whole or in parts, perhaps with host devices beside it; or several GPUs, for
/// which parts of one GPU stand if there is only one.
struct Box {
  const char* name;
  std::vector<double> fractions;  ///< none: the whole GPU
  int hosts = 0;
  int gpus = 1;  ///< 0: all, of which there are at least two
};

/// Parts of the first GPU, each with a memory space of its own, also when they are opened.
inline std::vector<Device> parts_as_gpus(std::size_t count) {
  setenv("PACELINE_PARTS_AS_GPUS", "1", 1);
  return partition("cuda:0", std::vector<double>(count, 1.0 / static_cast<double>(count)));
}

inline void PrintTo(const Box& box, std::ostream* out) { *out << box.name; }

inline const std::vector<Box>& boxes() {
  static const std::vector<Box> all = {{"OneGpu", {}},
                                       {"TwoEqualPartitions", {0.5, 0.5}},
                                       {"TwoUnequalPartitions", {0.75, 0.25}},
                                       {"FourPartitions", {0.25, 0.25, 0.25, 0.25}},
                                       {"GpuAndHost", {}, 1},
                                       {"TwoGpus", {}, 0, 2},
                                       {"AllGpus", {}, 0, 0}};
  return all;
}

/// @throws Unavailable where the driver has no partitions.
inline std::vector<Device> devices_of(const Box& box) {
  unsetenv("PACELINE_PARTS_AS_GPUS");
  if (box.gpus != 1) {
    std::vector<Device> gpus = CudaBackend().devices();
    if (gpus.size() < 2) return parts_as_gpus(box.gpus != 0 ? static_cast<std::size_t>(box.gpus) : 4);
    if (box.gpus != 0) gpus.resize(static_cast<std::size_t>(box.gpus));
    return gpus;
  }
  std::vector<Device> devices = box.fractions.empty() ? std::vector<Device>{find_device("cuda:0")}
                                                      : partition("cuda:0", std::span<const double>(box.fractions));
  for (int i = 0; i < box.hosts; ++i) devices.push_back(find_device("host:" + std::to_string(i)));
  return devices;
}

/// Skips every test of a machine without a GPU, saying why.
class NeedsGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const CudaBackend backend;
    if (backend.devices().empty()) GTEST_SKIP() << "no GPU: " << backend.why_none();
  }
};

}  // namespace paceline::gpu_test
