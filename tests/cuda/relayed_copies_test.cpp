// SPDX-License-Identifier: Apache-2.0
//
// How parameters come from GPU to GPU.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"

namespace paceline {
namespace {

TEST(ParametersOfGpus, LeaveHomeOnceAndAreRelayed) {
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3"});
    DeviceQueues queues(group, {.collectives = {.transport = Transport::copies}});
    constexpr std::size_t kSizes[] = {300, 90'001, 7, 20'000, 1};  // the last bucket is too small to be cut
    constexpr std::size_t kBucketOf[] = {0, 0, 0, 0, 1};
    std::vector<std::vector<std::unique_ptr<Buffer>>> memory(4);
    std::vector<std::unique_ptr<Buffer>> seen;
    std::vector<SpaceCopy> copies;
    for (const std::size_t size : kSizes) {
      for (std::size_t s = 0; s < 4; ++s) {
        Stream& stream = s == 0 ? queues.home_stream() : *queues.copy_stream(s);
        memory[s].push_back(queues.maker(s).allocate(size * sizeof(float), stream));
      }
    }
    for (std::size_t bucket = 0; bucket < 2; ++bucket) {
      for (std::size_t s = 1; s < 4; ++s) {
        seen.push_back(queues.maker(0).allocate_pinned(120'000 * sizeof(float)));
        for (std::size_t k = 0; k < std::size(kSizes); ++k) {
          if (kBucketOf[k] != bucket) continue;
          copies.push_back({s, memory[s][k]->data(), memory[0][k]->data(), kSizes[k] * sizeof(float), bucket});
        }
      }
    }
    for (int step = 0; step < 3; ++step) {
      ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
      const auto value = [&](std::size_t k) {
        return Write{static_cast<float*>(memory[0][k]->data()), kSizes[k],
                     static_cast<std::uint32_t>(9 * step + k + 1)};
      };
      for (std::size_t k = 0; k < std::size(kSizes); ++k) launch(&write_kernel, queues.home_stream(), value(k));
      const std::vector<bool> takes_part{true, true, step != 1, true};
      const std::shared_ptr<const StepTimes> times = queues.begin_step(copies, takes_part);
      for (const DeviceId d : std::span(group.ids()).subspan(1)) {
        if (!takes_part[d.number()]) continue;
        queues.enter(d, false);
        std::size_t offset = 0;
        for (std::size_t k = 0; k < std::size(kSizes); ++k) {
          queues.need(d, kBucketOf[k]);
          queues.stream(d)->copy(static_cast<float*>(seen[d.number()]->data()) + offset, memory[d.number()][k]->data(),
                                 kSizes[k] * sizeof(float));
          offset += kSizes[k];
        }
        queues.deliver(d, {});
      }
      queues.reduce();
      queues.end_step();
      times->wait();
      for (const DeviceId d : std::span(group.ids()).subspan(1)) {
        std::size_t offset = 0;
        for (std::size_t k = 0; takes_part[d.number()] && k < std::size(kSizes); ++k) {
          std::vector<float> wanted(kSizes[k]);
          write({wanted.data(), kSizes[k], value(k).seed});
          ASSERT_EQ(std::memcmp(wanted.data(), static_cast<float*>(seen[d.number()]->data()) + offset,
                                kSizes[k] * sizeof(float)),
                    0)
              << "seed " << seed << ", step " << step << ", device " << d.number() << ", parameter " << k;
          offset += kSizes[k];
        }
      }
    }
    queues.drain();
    seen.clear();
  });
}

/// A parameter and a buffer. Neither goes to the host more than once, and no GPU waits for another one's upload.
TEST(ParametersOfGpus, GoToTheHostOnceForAllGpusWithoutPeerAccess) {
  constexpr std::size_t kCount = 90'001;
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4, 1);
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3", "host:0"});
    DeviceQueues queues(group, {.collectives = {.transport = Transport::copies}});
    EXPECT_TRUE(queues.transport().ends_with("through the host, parameters copied to the host once for all GPUs"));
    std::vector<std::vector<std::unique_ptr<Buffer>>> memory(5);
    std::vector<std::unique_ptr<Buffer>> seen;
    std::vector<SpaceCopy> copies;
    for (std::size_t k = 0; k < 2; ++k) {
      for (std::size_t s = 0; s < 5; ++s) {
        Stream* const stream = s == 0 ? &queues.home_stream() : queues.copy_stream(s);
        memory[s].push_back(queues.allocate(s, kCount * sizeof(float), stream));
        if (s == 0) continue;
        seen.push_back(queues.maker(0).allocate_pinned(kCount * sizeof(float)));
        copies.push_back({.space = s,
                          .to = memory[s][k]->data(),
                          .from = memory[0][k]->data(),
                          .bytes = kCount * sizeof(float),
                          .bucket = k,
                          .relayed = k == 0});
      }
    }
    for (std::uint32_t step = 0; step < 3; ++step) {
      ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
      for (std::uint32_t k = 0; k < 2; ++k) {
        launch(&write_kernel, queues.home_stream(), Write{static_cast<float*>(memory[0][k]->data()), kCount, step + k});
      }
      const std::vector<bool> takes_part{true, true, step != 1, true, true};
      const fake::HostCopies before = fake::host_copies();
      const std::shared_ptr<const StepTimes> times = queues.begin_step(copies, takes_part);
      const int gpus = step == 1 ? 2 : 3;
      static_cast<void>(queues.copy_stream(1));  // everything is enqueued
      // One more download of each goes to the host device's own memory.
      EXPECT_EQ(fake::host_copies() - before, (fake::HostCopies{2 * 2, 2 * gpus})) << "step " << step;
      for (const DeviceId d : std::span(group.ids()).subspan(1)) {
        if (!takes_part[d.number()]) continue;
        queues.enter(d);
        for (std::size_t k = 0; k < 2; ++k) {
          void* const to = seen[k * 4 + d.number() - 1]->data();
          if (queues.stream(d) != nullptr) {
            queues.stream(d)->copy(to, memory[d.number()][k]->data(), kCount * sizeof(float));
          } else {
            std::memcpy(to, memory[d.number()][k]->data(), kCount * sizeof(float));
          }
        }
        queues.deliver(d, {});
      }
      queues.reduce();
      queues.end_step();
      times->wait();
      for (std::uint32_t k = 0; k < 2; ++k) {
        std::vector<float> wanted(kCount);
        write({wanted.data(), kCount, step + k});
        for (std::size_t d = 1; d < 5; ++d) {
          if (!takes_part[d]) continue;
          ASSERT_EQ(std::memcmp(wanted.data(), seen[k * 4 + d - 1]->data(), kCount * sizeof(float)), 0)
              << "step " << step << ", device " << d << ", bucket " << k;
        }
      }
    }
    queues.drain();
    seen.clear();
    memory[4].clear();
  });
}

/// A device writes to its buffers as soon as it has them. So nobody may pull them from it.
TEST(BuffersOfGpus, AreNotRelayed) {
  constexpr std::size_t kCount = 90'000;  // large enough to be cut
  for_each_order(kOrders / 8, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3"});
    DeviceQueues queues(group, {});
    std::vector<std::vector<std::unique_ptr<Buffer>>> memory(4);  // a buffer and a parameter
    std::vector<SpaceCopy> copies;
    for (std::size_t k = 0; k < 2; ++k) {
      for (std::size_t s = 0; s < 4; ++s) {
        Stream& stream = s == 0 ? queues.home_stream() : *queues.copy_stream(s);
        memory[s].push_back(queues.maker(s).allocate(kCount * sizeof(float), stream));
        if (s == 0) continue;
        copies.push_back({.space = s,
                          .to = memory[s][k]->data(),
                          .from = memory[0][k]->data(),
                          .bytes = kCount * sizeof(float),
                          .bucket = k,
                          .relayed = k == 1});
      }
    }
    for (int step = 0; step < 2; ++step) {
      const auto write = [&](std::size_t s, std::size_t k, Stream& stream) {
        ASSERT_EQ(cudaSetDevice(static_cast<int>(s)), cudaSuccess);
        launch(&write_kernel, stream, Write{static_cast<float*>(memory[s][k]->data()), kCount, 5});
      };
      for (std::size_t k = 0; k < 2; ++k) ASSERT_NO_FATAL_FAILURE(write(0, k, queues.home_stream()));
      const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
      for (const DeviceId d : std::span(group.ids()).subspan(1)) {
        queues.enter(d, false);
        queues.need(d, 0);
        ASSERT_NO_FATAL_FAILURE(write(d.number(), 0, *queues.stream(d)));
        queues.deliver(d, {});
      }
      queues.reduce();
      queues.end_step();
      times->wait();
    }
    queues.drain();
  });
}

TEST(ParametersOfGpus, OfALargeBucketGoOnWhileTheRestStillComes) {
  boot_with_writes(1, 3, 3);
  {
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2"});
    DeviceQueues queues(group, {.collectives = {.transport = Transport::copies}});
    constexpr std::size_t kPiece = std::size_t{32} << 20, kBytes = 2 * kPiece, kCount = kBytes / sizeof(float);
    constexpr double kSpeed = 1e9;
    fake::set_link(0, 1, kSpeed);
    fake::set_link(1, 2, kSpeed);
    const std::size_t checked = fake::bytes_between_gpus();  // whether they arrive
    std::vector<std::unique_ptr<Buffer>> memory;
    std::vector<SpaceCopy> copies;
    for (std::size_t s = 0; s < 3; ++s) {
      memory.push_back(queues.maker(s).allocate(kBytes, s == 0 ? queues.home_stream() : *queues.copy_stream(s)));
      if (s > 0) copies.push_back({s, memory[s]->data(), memory[0]->data(), kBytes});
    }
    std::vector<float> wanted(kCount);
    write({wanted.data(), kCount, 5});
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    launch(&write_kernel, queues.home_stream(), Write{static_cast<float*>(memory[0]->data()), kCount, 5});
    const std::unique_ptr<Event> sent = queues.maker(2).make_event(true), arrived = queues.maker(2).make_event(true);
    queues.copy_stream(2)->record(*sent);
    const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
    queues.copy_stream(2)->record(*arrived);
    const std::unique_ptr<Buffer> seen = queues.maker(2).allocate_pinned(kBytes);
    queues.enter(2);
    queues.stream(2)->copy(seen->data(), memory[2]->data(), kBytes);
    queues.deliver(2, {});
    queues.reduce();
    queues.end_step();
    times->wait();
    EXPECT_EQ(std::memcmp(wanted.data(), seen->data(), kBytes), 0);
    EXPECT_NEAR(arrived->seconds_since(*sent), 3 * static_cast<double>(kPiece) / kSpeed, 1e-3) << "not four pieces";
    EXPECT_EQ(fake::bytes_between_gpus() - checked, 2 * kBytes);
    queues.drain();
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

TEST(ParametersOfGpus, ThatLieOneBehindTheOtherGoOnInOneCopy) {
  boot_with_writes(1, 3, 3);
  {
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2"});
    DeviceQueues queues(group, {.collectives = {.transport = Transport::copies}});
    constexpr std::size_t kCount = 16'384, kBytes = kCount * sizeof(float), kCopies = 8;
    std::vector<std::unique_ptr<Buffer>> ours, theirs;
    for (std::size_t s = 1; s < 3; ++s) {
      theirs.push_back(queues.maker(s).allocate(kCopies * kBytes, *queues.copy_stream(s)));
    }
    std::vector<SpaceCopy> copies;
    for (std::size_t k = 0; k < kCopies; ++k) {
      ours.push_back(queues.maker(0).allocate(kBytes, queues.home_stream()));
      const Write one{static_cast<float*>(ours[k]->data()), kCount, static_cast<std::uint32_t>(k)};
      ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
      launch(&write_kernel, queues.home_stream(), one);
    }
    for (std::size_t s = 1; s < 3; ++s) {
      for (std::size_t k = 0; k < kCopies; ++k) {
        copies.push_back({s, static_cast<char*>(theirs[s - 1]->data()) + k * kBytes, ours[k]->data(), kBytes});
      }
    }
    constexpr double kEach = 1e-3;
    fake::set_peer_copy_seconds(kEach);
    const std::unique_ptr<Event> sent = queues.maker(2).make_event(true), arrived = queues.maker(2).make_event(true);
    queues.copy_stream(2)->record(*sent);
    const std::shared_ptr<const StepTimes> times = queues.begin_step(copies);
    queues.copy_stream(2)->record(*arrived);
    const std::unique_ptr<Buffer> seen = queues.maker(2).allocate_pinned(kCopies * kBytes);
    queues.enter(2);
    queues.stream(2)->copy(seen->data(), theirs[1]->data(), kCopies * kBytes);
    queues.deliver(2, {});
    queues.reduce();
    queues.end_step();
    times->wait();
    EXPECT_NEAR(arrived->seconds_since(*sent), (kCopies + 1) * kEach, 0.5 * kEach);
    for (std::size_t k = 0; k < kCopies; ++k) {
      std::vector<float> wanted(kCount);
      write({wanted.data(), kCount, static_cast<std::uint32_t>(k)});
      EXPECT_EQ(std::memcmp(wanted.data(), static_cast<char*>(seen->data()) + k * kBytes, kBytes), 0) << k;
    }
    queues.drain();
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

}  // namespace
}  // namespace paceline
