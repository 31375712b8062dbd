// SPDX-License-Identifier: Apache-2.0
//
// Pools on GPUs: a job ends when its GPUs have done what it has enqueued, whatever order the fake runs things in.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>

#include "errors.hpp"
#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "pool_launches.hpp"

namespace paceline {
namespace {

TEST(CudaPool, AJobEndsWhenItsGpuHasDoneItsWork) {
  for_each_order(20, [](std::uint64_t seed) {
    set_up(seed, 1);
    Pool pool(group_of({"cuda:0"}));
    for (int k = 1; k <= 3; ++k) {
      const Future<int> job = pool.submit([&](Job& here) {
        EXPECT_NE(here.stream(), nullptr);
        for (int i = 0; i < 5; ++i) launch(0, here.stream(), 0.125);
        return 7;
      });
      EXPECT_EQ(job.get(), 7);
      EXPECT_EQ(ran, 5 * k);
      EXPECT_GE(job.report().seconds, 5 * 0.125) << "not by the device's clock";
    }
  });
}

TEST(CudaPool, AGangEndsWhenAllItsGpusHaveDoneTheirWork) {
  for_each_order(20, [](std::uint64_t seed) {
    set_up(seed, 2);
    Pool pool(group_of({"cuda:0", "host:0", "cuda:1"}));
    pool.submit(
            [&](Job& here) {
              ASSERT_EQ(here.streams().size(), 3U);
              for (std::size_t k = 0; k < 3; ++k) {
                const bool gpu = here.devices()[k]->kind == DeviceKind::cuda;
                ASSERT_EQ(here.streams()[k] != nullptr, gpu);
                if (gpu) launch(here.devices()[k]->index, here.streams()[k]);
              }
            },
            {.gang = 3})
        .get();
    EXPECT_EQ(ran, 2);
  });
}

TEST(CudaPool, ACallThatThrowsEndsAfterWhatItHasEnqueued) {
  for_each_order(20, [](std::uint64_t seed) {
    set_up(seed, 1);
    Pool pool(group_of({"cuda:0"}));
    const Future<void> job = pool.submit([&](Job& here) {
      launch(0, here.stream());
      throw std::runtime_error("no");
    });
    EXPECT_THROW(job.get(), std::runtime_error);
    EXPECT_EQ(ran, 1);
  });
}

TEST(CudaPool, NoThreadWaitsForAGpuThatIsLate) {
  set_up(0, 1);
  {
    Pool pool(group_of({"cuda:0"}));
    Stream* const stream = pool.stream("cuda:0");
    fake::hang(stream->native());
    std::atomic<bool> enqueued{false};
    const Future<void> job = pool.submit([&](Job& here) {
      launch(0, here.stream());
      enqueued = true;
    });
    while (!enqueued) std::this_thread::yield();
    DeviceGroup other = group_of({"cuda:0"});
    EXPECT_EQ(other.async([](const Device& device) { return device.name; }).get(), "cuda:0") << "its worker is free";
    EXPECT_FALSE(job.ready());
    EXPECT_FALSE(job.cancel());
    fake::go_on(stream->native());
    job.get();
    EXPECT_EQ(ran, 1);
  }
  expect_clean();
}

TEST(CudaPool, ABatchRunsElsewhereWhenItsGpuFailsAfterTheCall) {
  set_up(0, 2);
  {
    Pool pool(group_of({"cuda:0", "cuda:1"}));
    pool.retire("cuda:1");
    std::atomic<int> calls{0};
    auto batcher = pool.serve<int, int>([&](Job& here, std::span<int> requests, std::span<int> answers) {
      for (std::size_t k = 0; k < requests.size(); ++k) answers[k] = requests[k] + 1;
      launch(here.device().index, here.stream());
      if (++calls == 1) fake::poison(0, cudaErrorIllegalAddress);
    });
    const Future<int> answer = batcher.submit(3);
    while (calls == 0) std::this_thread::yield();
    pool.restore("cuda:1");
    EXPECT_EQ(answer.get(), 4);
    EXPECT_EQ(answer.report().device, "cuda:1");
    EXPECT_EQ(pool.active(), std::vector<std::string>{"cuda:1"});
    const auto lost = message_of([&] { pool.submit([](Job&) {}, {.needs = {"cuda:0"}}).get(); });
    EXPECT_TRUE(says(lost, "too few devices")) << lost;
  }
}

TEST(CudaPool, AJobWhoseGpuFailsHasTheErrorOfTheGpu) {
  set_up(0, 1);
  Pool pool(group_of({"cuda:0"}));
  const Future<void> job = pool.submit([&](Job&) {
    fake::poison(0, cudaErrorIllegalAddress);
    throw std::runtime_error("what follows from it");
  });
  EXPECT_THROW(job.get(), DeviceLost);
  EXPECT_THROW(pool.submit([](Job&) {}), DeviceLost);
}

TEST(CudaPool, AGpuThatJoinsTakesWorkAndItsStreamGoesWithTheOthers) {
  set_up(0, 2);
  Pool pool(group_of({"host:0"}));
  pool.add(find_device("cuda:1"));
  EXPECT_EQ(pool.stream("host:0"), nullptr);
  const Future<std::string> job = pool.submit(
      [&](Job& here) {
        launch(1, here.stream());
        return here.device().name;
      },
      {.needs = {"cuda"}});
  EXPECT_EQ(job.get(), "cuda:1");
  EXPECT_EQ(ran, 1);
  pool.close();
  pool.release();
  expect_clean();
}

/// Gives up the runs that have taken longer than some milliseconds, until there was one.
void give_up_one(Pool& pool) {
  for (bool found = false; !found;) {
    std::vector<plan::RunId> over;
    pool.visit_runs_over(0.01, [&](plan::RunId run, auto&&...) { over.push_back(run); });
    for (const plan::RunId run : over) found |= pool.give_up(run, std::make_exception_ptr(Timeout("it hangs")));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(CudaPool, AJobWhoseGpuHangsIsGivenUpAndKeepsWhatItUsesUntilTheGpuHasDoneIt) {
  set_up(0, 1);
  const auto used = std::make_shared<int>(7);
  {
    Pool pool(group_of({"cuda:0"}));
    Stream* const stream = pool.stream("cuda:0");
    const cudaStream_t native = stream->native();
    fake::hang(native);
    const Future<void> job = pool.submit([used, native](Job& here) {
      EXPECT_EQ(here.stream()->native(), native);
      launch(0, here.stream());
    });
    give_up_one(pool);
    EXPECT_THROW(job.get(), Timeout);
    EXPECT_NE(pool.stream("cuda:0"), stream);
    pool.submit([&](Job& here) {
          EXPECT_NE(here.stream()->native(), native);
          launch(0, here.stream());
        })
        .get();
    EXPECT_EQ(ran, 1) << "the job that hangs holds up the next one";
    EXPECT_EQ(used.use_count(), 2) << "freed, and the GPU may write there";
    fake::go_on(native);
    while (used.use_count() > 1) pool.submit([](Job&) {}).get();
    EXPECT_EQ(ran, 2);
  }
  expect_clean();
}

TEST(CudaPool, ACallThatHangsOnAGpuEndsOnItsOwnStream) {
  for_each_order(20, [](std::uint64_t seed) {
    set_up(seed, 1);
    std::atomic<bool> open{false};
    const auto used = std::make_shared<int>(7);
    {
      Pool pool(group_of({"host:0"}));
      pool.add(find_device("cuda:0"));
      const JobOptions there{.needs = {"cuda"}};
      const Future<void> job = pool.submit(
          [&open, used](Job& here) {
            while (!open) std::this_thread::yield();
            for (int k = 0; k < 5; ++k) launch(0, here.stream());
          },
          there);
      give_up_one(pool);
      EXPECT_THROW(job.get(), Timeout);
      const auto one = [&](Job& here) { launch(0, here.stream()); };
      pool.submit(one, there).get();
      EXPECT_EQ(ran, 1);
      open = true;
      while (used.use_count() > 1) pool.submit(one, there).get();
    }
    expect_clean();
  });
}

TEST(CudaPool, WhatAGpuThatHangsMayUseIsNeverFreed) {
  set_up(0, 1);
  auto* const used = new std::shared_ptr<int>(std::make_shared<int>(7));
  {
    Pool pool(group_of({"cuda:0"}));
    fake::hang(pool.stream("cuda:0")->native());
    const Future<void> job = pool.submit([kept = *used](Job& here) { launch(0, here.stream()); });
    give_up_one(pool);
    EXPECT_THROW(job.get(), Timeout);
    pool.close();
    pool.release();
  }
  EXPECT_EQ(used->use_count(), 2);
  delete used;
}

TEST(CudaPool, WhatAJobExcludesDoesNotCountAndItsMemoryIsThatOfItsGpu) {
  set_up(0, 2);
  Pool pool(group_of({"cuda:0", "cuda:1"}), {}, 0.1, {{"cuda:0", 10.0}, {"cuda:1", 40.0}});
  for (int k = 0; k < 4; ++k) {
    const Future<std::string> job = pool.submit(
        [&](Job& here) {
          launch(here.device().index, here.stream(), 8.0);
          here.exclude(7.5);
          return here.device().name;
        },
        {.memory_bytes = 20.0});
    EXPECT_EQ(job.get(), "cuda:1");
    EXPECT_GE(job.report().seconds, 8.0);
  }
  EXPECT_NO_THROW(pool.submit([](Job&) {}, {.deadline_seconds = 4.0, .memory_bytes = 20.0}).get());
}

}  // namespace
}  // namespace paceline
