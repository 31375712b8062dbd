// SPDX-License-Identifier: Apache-2.0
//
// The fake's green contexts: do they refuse what drivers refuse, and notice what drivers only leak?
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "fake_cuda.hpp"
#include "green_contexts.hpp"

namespace fake {
namespace {

using Resources = std::vector<CUdevResource>;

Resources split(unsigned int least, CUdevResource* rest = nullptr) {
  CUdevResource whole{};
  EXPECT_EQ(device_resource(0, &whole, CU_DEV_RESOURCE_TYPE_SM), CUDA_SUCCESS);
  unsigned int count = 0;
  EXPECT_EQ(split_by_count(nullptr, &count, &whole, nullptr, 0, least), CUDA_SUCCESS);
  Resources groups(count);
  EXPECT_EQ(split_by_count(groups.data(), &count, &whole, rest, 0, least), CUDA_SUCCESS);
  return groups;
}

CUgreenCtx context_of(Resources groups) {
  CUdevResourceDesc description = nullptr;
  EXPECT_EQ(describe(&description, groups.data(), static_cast<unsigned int>(groups.size())), CUDA_SUCCESS);
  CUgreenCtx context = nullptr;
  EXPECT_EQ(create_green_context(&context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM), CUDA_SUCCESS);
  return context;
}

cudaStream_t stream_of(CUgreenCtx context) {
  CUstream stream = nullptr;
  EXPECT_EQ(create_green_stream(&stream, context, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
  return stream;
}

TEST(FakeGreenContexts, SplitIntoGroupsOfTheGranularity) {
  boot({.multiprocessors = 132, .sm_granularity = 8});
  CUdevResource rest{};
  EXPECT_EQ(split(0, &rest).size(), 16U);
  EXPECT_EQ(rest.sm.smCount, 4U);
  EXPECT_EQ(split(9).size(), 8U);
  EXPECT_EQ(split(9).front().sm.smCount, 16U);
}

TEST(FakeGreenContexts, MergeGroupsOfOneSplitOnly) {
  boot({});
  const Resources groups = split(8);
  EXPECT_EQ(sms_of(stream_of(context_of({groups[1], groups[3]}))),
            (std::vector<int>{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}));
  Resources mixed{groups[0], split(8)[5]};
  CUdevResourceDesc description = nullptr;
  EXPECT_EQ(describe(&description, mixed.data(), 2), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  unsigned int count = 1;
  CUdevResource again{};
  EXPECT_EQ(split_by_count(&again, &count, groups.data(), nullptr, 0, 8), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
}

TEST(FakeGreenContexts, CountWhatIsLeft) {
  boot({});
  const CUgreenCtx context = context_of({split(8)[0]});
  const cudaStream_t stream = stream_of(context);
  EXPECT_EQ(leftovers().green_contexts, 1U);
  EXPECT_EQ(leftovers().streams, 1U);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(destroy_green_context(context), CUDA_SUCCESS);
  EXPECT_EQ(leftovers(), Leftovers{});
}

TEST(FakeGreenContextsDeathTest, EndTheProgramWhereCudaIsSilent) {
  boot({});
  const Resources groups = split(8);
  const CUgreenCtx context = context_of({groups[0], groups[1]});
  EXPECT_DEATH(context_of({groups[1]}), "share SMs");
  const cudaStream_t stream = stream_of(context);
  EXPECT_DEATH(destroy_green_context(context), "before its streams");
  EXPECT_DEATH(
      {
        void* host = nullptr;
        cudaHostAlloc(&host, 8, 0);
        hang(stream);
        cudaMemsetAsync(host, 0, 8, stream);
        cudaStreamDestroy(stream);
        destroy_green_context(context);
      },
      "while work of its streams was running");
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(destroy_green_context(context), CUDA_SUCCESS);
  EXPECT_DEATH(stream_of(context), "was destroyed was used");
}

}  // namespace
}  // namespace fake
