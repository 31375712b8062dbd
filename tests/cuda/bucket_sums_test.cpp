// SPDX-License-Identifier: Apache-2.0
//
// Buckets that are summed while devices still compute: which waits for which, and that nothing else waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"
#include "sealed_buckets.hpp"

namespace paceline {
namespace {

constexpr std::size_t kLine = 256;  // bytes; more than the smallest bucket takes

class BucketSums : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(BucketSums, AreThoseOfTheHostWhoeverSealsWhenAndHow) {
  for_each_order(kOrders / 16, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    std::minstd_rand random(static_cast<std::uint32_t>(seed) + 1);
    const DeviceGroup group = group_of(GetParam());
    const bool nccl = seed % 5 == 0 && GetParam().size() == 2;  // whose own order of two is the same
    std::optional<DType> travels;
    if (seed % 3 != 0 && !nccl) travels = seed % 3 == 1 ? DType::bfloat16 : DType::float16;
    Buckets buckets(group, {.collectives = {.transport = nccl ? Transport::nccl : Transport::copies},
                            .chunk_bytes = seed % 2 == 0 ? std::size_t{25} << 20 : std::size_t{200'000},
                            .reduce_dtype = travels});
    for (int step = 0; step < 3; ++step) {
      std::vector<std::vector<std::uint32_t>> seeds(group.size());
      std::vector<bool> takes_part(group.size(), true);
      if (step == 1 && group.size() > 2 && !nccl) takes_part[random() % group.size()] = false;
      buckets.begin(takes_part);
      std::vector<DeviceId> devices;
      for (const DeviceId d : group.ids()) {
        if (takes_part[d.number()]) devices.push_back(d);
      }
      std::shuffle(devices.begin(), devices.end(), random);
      std::vector<std::vector<bool>> sealed(group.size(), std::vector<bool>(std::size(kCounts), false));
      std::vector<std::tuple<DeviceId, std::size_t, NativeEvent>> marked;  // sealed later, by an event
      for (const DeviceId d : devices) {
        buckets.queues.enter(d);
        for (std::size_t k = 0; k < std::size(kCounts); ++k) {
          seeds[d.number()].push_back(static_cast<std::uint32_t>(random()));
          ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, seeds[d.number()][k]));
          const auto how = random() % 4;
          if (how == 0) continue;
          sealed[d.number()][k] = true;
          if (how == 1) {
            marked.push_back({d, k, buckets.mark(d)});
          } else {
            buckets.queues.seal(d, k, buckets.view(d, k));
          }
        }
      }
      for (const auto& [d, k, mark] : marked) buckets.queues.seal(d, k, buckets.view(d, k), mark);
      std::shuffle(devices.begin(), devices.end(), random);
      for (const DeviceId d : devices) {
        const std::size_t k = random() % std::size(kCounts);
        if (random() % 2 == 0) sealed[d.number()][k] = false;  // sealed again
        buckets.deliver(d, sealed[d.number()]);
      }
      buckets.end();
      ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(seeds, travels)) << "seed " << seed << ", step " << step;
    }
  });
}

TEST_P(BucketSums, BeginWhileTheDevicesStillCompute) {
  for_each_order(kOrders / 16, [&](std::uint64_t seed) {
    boot_with_writes(seed, 4);
    const DeviceGroup group = group_of(GetParam());
    Buckets buckets(group, {.collectives = {.transport = Transport::copies}});
    DeviceQueues& queues = buckets.queues;
    buckets.begin();
    std::vector<std::vector<std::uint32_t>> seeds(group.size(), {11, 12, 13});
    std::vector<NativeEvent> marks(group.size(), nullptr);
    const bool by_event = seed % 2 == 1;  // of the caller, and sealed when more work is enqueued already
    for (const DeviceId d : group.ids()) {
      queues.enter(d);
      ASSERT_NO_FATAL_FAILURE(buckets.fill(d, 0, 11));
      if (by_event) {
        marks[d.number()] = buckets.mark(d);
      } else {
        queues.seal(d, 0, buckets.view(d, 0));
      }
    }
    for (const DeviceId d : group.ids()) {
      ASSERT_NO_FATAL_FAILURE(buckets.fill(d, 1, 12));  // more work, which nobody may wait for
      if (queues.stream(d) != nullptr) {
        const std::unique_ptr<Event> written = queues.maker(queues.space_of(d)).make_event(false);
        queues.stream(d)->record(*written);
        wait_for(*written);
        fake::hang(queues.stream(d)->native());
      }
      ASSERT_NO_FATAL_FAILURE(buckets.fill(d, 2, 13));
    }
    for (const DeviceId d : group.ids()) {
      if (by_event) queues.seal(d, 0, buckets.view(d, 0), marks[d.number()]);
    }
    AsyncDevice& home = queues.maker(queues.home_space());
    const std::unique_ptr<Event> summed = home.make_event(false);
    queues.home_stream().record(*summed);
    ASSERT_NO_THROW(wait_for(*summed, std::chrono::seconds(30)));
    for (const DeviceId d : group.ids()) {
      if (queues.stream(d) != nullptr) fake::go_on(queues.stream(d)->native());
      buckets.deliver(d, {true, false, false});
    }
    buckets.end();
    ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(seeds));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, BucketSums,
    ::testing::Values(std::vector<std::string>{"cuda:0/0", "cuda:0/1"}, std::vector<std::string>{"cuda:0", "cuda:1"},
                      std::vector<std::string>{"cuda:2", "cuda:0", "cuda:1"},
                      std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3"},
                      std::vector<std::string>{"host:0", "cuda:1/0", "cuda:1/1", "cuda:0", "cuda:2"}));

TEST(BucketSumsOfGpus, AreMadeInSlicesByTheOthers) {
  boot_with_writes(1, 3, 3);
  const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2"});
  Buckets buckets(group, {.collectives = {.transport = Transport::copies}});
  const std::size_t before = buckets.queues.maker(0).peak_bytes();
  const std::size_t checked = fake::bytes_between_gpus();  // whether they arrive
  buckets.begin();
  for (const DeviceId d : group.ids()) {
    buckets.queues.enter(d);
    for (std::size_t k = 0; k < std::size(kCounts); ++k) ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, 7));
    buckets.deliver(d, {false, false, false});
  }
  buckets.end();
  const std::vector<std::uint32_t> same{7, 7, 7};
  ASSERT_NO_FATAL_FAILURE(buckets.expect_sums({same, same, same}));
  // Home pulls finished sums to where they belong; only of the smallest bucket it pulls what both others have.
  EXPECT_LE(buckets.queues.maker(0).peak_bytes() - before, 2 * kLine);
  // Each of the three gets each large bucket once.
  EXPECT_EQ(fake::bytes_between_gpus() - checked,
            3 * (kCounts[0] + kCounts[2]) * sizeof(float) + 2 * kCounts[1] * sizeof(float));
}

TEST(BucketSumsOfGpus, InAHalfTypeDoNotDependOnWhoSumsWhat) {
  for (const std::size_t chunk_bytes : {std::size_t{25} << 20, std::size_t{4096}}) {  // the latter is summed at home
    boot_with_writes(1, 4);
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "host:0"});
    Buckets buckets(group, {.chunk_bytes = chunk_bytes, .reduce_dtype = DType::bfloat16});
    buckets.begin();
    for (const DeviceId d : group.ids()) {
      buckets.queues.enter(d);
      for (std::size_t k = 0; k < std::size(kCounts); ++k)
        ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, static_cast<std::uint32_t>(7 + d.number())));
      buckets.deliver(d, {false, false, false});
    }
    buckets.end();
    ASSERT_NO_FATAL_FAILURE(buckets.expect_sums({{7, 7, 7}, {8, 8, 8}, {9, 9, 9}, {10, 10, 10}}, DType::bfloat16));
  }
}

TEST(BucketSumsOfGpus, AskTheDriverOnceWhereTheirMemoryLies) {
  boot_with_writes(1, 4);
  const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "host:0"});
  Buckets buckets(group, {});
  for (int step = 0; step < 3; ++step) {
    const int asked = fake::pointer_queries();
    buckets.begin();
    EXPECT_EQ(fake::pointer_queries() - asked, step == 0 ? std::size(kCounts) : 0U) << "outputs of step " << step;
    for (const DeviceId d : group.ids()) {
      buckets.queues.enter(d);
      for (std::size_t k = 0; k < std::size(kCounts); ++k) ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, 7));
      const int before = fake::pointer_queries();
      for (std::size_t k = 0; k < std::size(kCounts); ++k) buckets.queues.seal(d, k, buckets.view(d, k));
      EXPECT_EQ(fake::pointer_queries() - before, step == 0 ? std::size(kCounts) : 0U) << "step " << step;
      buckets.deliver(d, {true, true, true});
    }
    buckets.end();
    const std::vector<std::uint32_t> same{7, 7, 7};
    ASSERT_NO_FATAL_FAILURE(buckets.expect_sums({same, same, same, same}));
  }
}

TEST(BucketSumsOfGpus, AHalfTypeHalvesWhatLinksCarry) {
  const auto bytes_between_gpus = [](std::optional<DType> travels) {
    boot_with_writes(1, 4);
    const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3"});
    Buckets buckets(group, {.reduce_dtype = travels});
    const std::size_t checked = fake::bytes_between_gpus();
    buckets.begin();
    for (const DeviceId d : group.ids()) {
      buckets.queues.enter(d);
      EXPECT_NO_FATAL_FAILURE(buckets.fill(d, 0, 7));
      buckets.queues.seal(d, 0, buckets.view(d, 0));
    }
    static_cast<void>(buckets.queues.home_stream());  // waits until the sums are enqueued
    buckets.queues.drain();
    return fake::bytes_between_gpus() - checked;
  };
  const std::size_t whole = bytes_between_gpus(std::nullopt);
  EXPECT_GE(whole, kCounts[0] * sizeof(float));
  EXPECT_EQ(2 * bytes_between_gpus(DType::bfloat16), whole);
}

TEST(BucketSumsOfGpus, OfATrainerGoInTheTypeAskedFor) {
  for (const bool rounded : {true, false}) {
    boot(1, 2);
    {
      const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1"});
      DataParallelOptions options{.parameter_count = 3, .balance = Balance::even};
      options.collectives = {.transport = Transport::copies};
      if (rounded) options.reduce_dtype = DType::bfloat16;
      BasicDataParallel<float> trainer(group, options);
      const std::unique_ptr<AsyncDevice> first = backend_of(group.devices()[0]).open(group.devices()[0]);
      const std::unique_ptr<Buffer> given = first->allocate_pinned(3 * sizeof(float));
      const std::unique_ptr<Buffer> seen = first->allocate_pinned(3 * sizeof(float));
      for (std::size_t j = 0; j < 3; ++j) static_cast<float*>(given->data())[j] = 1.001F;  // lies next to 1 in bfloat16
      const Objective loss = trainer.step(2, [&](const MicroBatch&, Replica& replica) {
        EXPECT_EQ(cudaMemcpyAsync(replica.gradients.data(), given->data(), 3 * sizeof(float), cudaMemcpyDefault,
                                  replica.stream),
                  cudaSuccess);
        return 1.0;
      });
      EXPECT_EQ(loss.value(), 1.0);
      const std::unique_ptr<Stream> stream = first->adopt_stream(trainer.stream());
      stream->copy(seen->data(), trainer.gradients().data(), 3 * sizeof(float));
      const std::unique_ptr<Event> copied = first->make_event(false);
      stream->record(*copied);
      wait_for(*copied);
      for (std::size_t j = 0; j < 3; ++j) EXPECT_EQ(static_cast<float*>(seen->data())[j], rounded ? 1.0F : 1.001F);
    }
    EXPECT_EQ(fake::problems(), std::vector<std::string>{});
    EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
  }
}

TEST(BucketSumsOfGpus, RefuseTypesThatAreNoHalfTypesAndNccl) {
  boot_with_writes(1, 2);
  const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1"});
  EXPECT_THROW(DeviceQueues(group, {.reduce_dtype = DType::float64}), InvalidArgument);
  EXPECT_THROW(DeviceQueues(group, {.collectives = {.transport = Transport::nccl}, .reduce_dtype = DType::bfloat16}),
               InvalidArgument);
}

}  // namespace
}  // namespace paceline
