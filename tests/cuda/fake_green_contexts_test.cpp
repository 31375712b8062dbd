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
