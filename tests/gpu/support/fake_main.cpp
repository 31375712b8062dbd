// SPDX-License-Identifier: Apache-2.0
//
// Runs the tests for GPUs on the fake of the CUDA runtime: each on a fresh machine, with host twins of the test
// kernels.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "fake_cuda.hpp"
#include "kernels.hpp"
#include "nccl_host.hpp"
#include "twins.hpp"

namespace {

using namespace paceline::gpu_test;

void set_test_twins() {
  fake::twin(&paceline_test_backward, [](const fake::Launch&, const Work& work) {
    fake::reads(work.parameters, work.width * sizeof(double));
    fake::writes(work.gradients, work.width * sizeof(double));
    fake::writes(work.loss, sizeof(double));
    for (std::int64_t item = work.begin; item < work.end; ++item) {
      for (std::size_t j = 0; j < work.width; ++j) {
        const double distance = work.parameters[j] - point(item, j);
        *work.loss += distance * distance / 2;
        work.gradients[j] += distance;
      }
    }
  });
  fake::twin(&paceline_test_update,
             [](const fake::Launch&, double* parameters, const double* gradients, std::size_t width) {
               fake::reads(gradients, width * sizeof(double));
               fake::writes(parameters, width * sizeof(double));
               for (std::size_t j = 0; j < width; ++j) parameters[j] -= kLearningRate * gradients[j];
             });
  fake::twin(&paceline_test_delay, [](const fake::Launch&, unsigned long long nanoseconds) {
    fake::takes(1e-9 * static_cast<double>(nanoseconds));
  });
}

class FreshMachine : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    const char* const gpus = std::getenv("PACELINE_FAKE_GPUS");
    fake::boot({.seed = ++seed_, .device_count = gpus != nullptr ? std::atoi(gpus) : 4});
    fake::set_twins();
    set_test_twins();
    fake::boot_nccl();
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    for (const std::string& problem : fake::problems()) ADD_FAILURE() << problem;
    EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
    EXPECT_EQ(fake::the_nccl().problems(), std::vector<std::string>{});
    EXPECT_EQ(fake::the_nccl().communicators(), 0);
  }

  std::uint64_t seed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new FreshMachine);  // which gtest deletes
  return RUN_ALL_TESTS();
}
