// SPDX-License-Identifier: Apache-2.0
//
// The thread that enqueues the sums of four GPUs and more, in a call of CUDA's that does not come back.
#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <string>

#include <paceline/engine/device_queues.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "interrupts.hpp"
#include "pump_steps.hpp"
#include "queued_steps.hpp"
#include "sealed_buckets.hpp"

namespace paceline {
namespace {

void expect_a_timeout(Buckets& buckets, int device) {
  try {
    buckets.queues.reduce();
    ADD_FAILURE() << "it does not come back, and nobody says so";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.device(), "cuda:" + std::to_string(device));
    EXPECT_NE(std::string(error.what()).find(error.device()), std::string::npos) << error.what();
  }
}

TEST(SumPump, IsLeftBehindWhereCudaDoesNotComeBackAndEnqueuesNothingMore) {
  for (const bool ends_first : {false, true}) {  // the queues, before the call comes back
    boot_with_writes(1, 4, 4);
    HangingCopy copy;
    {
      Buckets buckets(group_of(kFour), {.timeout = kShort});
      copy.arm(1, ends_first ? cudaErrorUnknown : cudaSuccess);
      ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      copy.await();
      ASSERT_NO_FATAL_FAILURE(expect_a_timeout(buckets, 1));
      buckets.queues.drain();
      EXPECT_THROW(buckets.begin(), DeviceLost);
      EXPECT_TRUE(has_thread(kThread));
      if (!ends_first) copy.end();
    }
    copy.end();
    EXPECT_EQ(copy.copies, 2);
  }
}

TEST(SumPump, EnqueuesNothingMoreInWhicheverCopyItIsLeftBehind) {
  for (const std::optional<DType> travels : {std::optional<DType>(), std::optional(DType::bfloat16)}) {
    boot_with_writes(1, 4, 4);
    const int copies = [&] {
      Buckets buckets(group_of(kFour), {.reduce_dtype = travels});
      const Copiers copiers;
      EXPECT_NO_FATAL_FAILURE(begin_and_seal(buckets));
      await_the_pump(buckets);
      return copiers.count();
    }();
    ASSERT_EQ(copies, (9 + 3) + 3 + (9 + 3)) << "of the two large buckets home pulls three slices";
    for (int which = 0; which < copies; ++which) {
      boot_with_writes(1, 4, 4);
      HangingCopy copy;
      Buckets buckets(group_of(kFour), {.timeout = kShort, .reduce_dtype = travels});
      buckets.begin();
      ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
      hang_all_streams(buckets.queues);
      copy.arm(which);
      seal_all(buckets);
      deliver_all(buckets);
      copy.await();
      ASSERT_NO_FATAL_FAILURE(expect_a_timeout(buckets, copy.device)) << "copy " << which;
      const std::size_t queued = fake::leftovers().queued;
      copy.end();
      EXPECT_EQ(copy.copies, which + 1);
      EXPECT_EQ(fake::leftovers().queued, queued + 1) << "after copy " << which;  // the copy itself
    }
  }
}

TEST(SumPump, EnqueuesNothingMoreForWhoIsInterruptedWhileItDrains) {
  boot_with_writes(1, 4, 4);
  {
    std::optional<HangingCopy> copy(std::in_place);
    Buckets buckets(group_of(kFour), {});
    copy->arm(10);  // home's second one of the first bucket
    ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
    copy->await();
    {
      const Interrupting soon;
      EXPECT_THROW(buckets.queues.drain(), Interrupt);
    }
    copy->comes_back = true;
    await_the_pump(buckets);
    EXPECT_EQ(copy->copies, 11);
    copy.reset();
    ASSERT_NO_FATAL_FAILURE(expect_a_step(buckets));
  }
  ASSERT_NO_FATAL_FAILURE(expect_clean());
}

TEST(SumPump, IsNotAwaitedForLongByWhoIsInterruptedWhileItEnds) {
  boot_with_writes(1, 4, 4);
  HangingCopy copy;
  {
    std::optional<Interrupting> soon;
    Buckets buckets(group_of(kFour), {});  // waits for ten minutes
    copy.arm(10, cudaErrorUnknown);        // its memory is gone when it comes back
    ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
    copy.await();
    soon.emplace();
  }
  EXPECT_TRUE(has_thread(kThread));
  copy.end();
}

}  // namespace
}  // namespace paceline
