// SPDX-License-Identifier: Apache-2.0
//
// Buckets that are summed while devices still compute: which waits for which, and that nothing else waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/comm/reduce.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "orders.hpp"
#include "queued_steps.hpp"

namespace paceline {
namespace {

struct Write {
  float* to;
  std::size_t count;
  std::uint32_t seed;
};

void write_kernel(Write) {}

/// Values whose sum depends on the order of the additions.
void write(const Write& one) {
  std::minstd_rand random(one.seed);
  for (std::size_t i = 0; i < one.count; ++i) {
    one.to[i] = static_cast<float>(random() % 2000003) * (random() % 2 == 0 ? 1e-3F : -1e3F);
  }
}

void boot_with_writes(std::uint64_t seed, int gpus) {
  boot(seed, gpus);
  fake::twin(&write_kernel, [](const fake::Launch&, const Write& one) {
    fake::writes(one.to, one.count * sizeof(float));
    write(one);
  });
}

/// Large enough to be cut into slices, and a tail that is not a whole number of them.
constexpr std::size_t kCounts[] = {90'000, 3, 70'001};

/// The devices' buckets, in memory that stays, and the sums.
class Buckets {
 public:
  Buckets(const DeviceGroup& group, const DeviceQueueOptions& options) : group_(group), queues(group, options) {
    for (DeviceId d = 0; d < group.size(); ++d) {
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
    queues.drain();
    for (DeviceId d = 0; d < group_.size(); ++d) {
      if (queues.stream(d) == nullptr) buckets_[d].clear();
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
    return {buckets_[d][k]->data(), kCounts[k], DType::float32};
  }

  void fill(DeviceId d, std::size_t k, std::uint32_t seed) {
    const Write one{static_cast<float*>(buckets_[d][k]->data()), kCounts[k], seed};
    if (queues.stream(d) == nullptr) return write(one);
    ASSERT_EQ(cudaSetDevice(group_.devices()[d].index), cudaSuccess);
    launch(&write_kernel, *queues.stream(d), one);
  }

  /// Records an event of the caller behind the device's work so far, as a graph would. Null on the host.
  void* mark(DeviceId d) {
    if (queues.stream(d) == nullptr) return nullptr;
    cudaEvent_t& event = marks_.emplace_back();
    EXPECT_EQ(cudaSetDevice(group_.devices()[d].index), cudaSuccess);
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, static_cast<cudaStream_t>(queues.stream(d)->native())), cudaSuccess);
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

  /// The sums of what these seeds give, in the order of the devices, to the bit.
  void expect_sums(const std::vector<std::vector<std::uint32_t>>& seeds) {
    times->wait();
    for (std::size_t k = 0; k < std::size(kCounts); ++k) {
      std::vector<std::vector<float>> parts;
      std::vector<const void*> inputs;
      for (const std::vector<std::uint32_t>& device : seeds) {
        if (device.empty()) continue;  // had no work
        parts.emplace_back(kCounts[k]);
        write({parts.back().data(), kCounts[k], device[k]});
      }
      for (const std::vector<float>& part : parts) inputs.push_back(part.data());
      std::vector<float> sum(kCounts[k]);
      reduce_block(inputs, sum.data(), kCounts[k], DType::float32, ReduceOp::sum);
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

class BucketSums : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(BucketSums, AreThoseOfTheHostWhoeverSealsWhenAndHow) {
  for (std::uint64_t seed = 0; seed < kOrders / 16; ++seed) {
    boot_with_writes(seed, 4);
    std::minstd_rand random(static_cast<std::uint32_t>(seed) + 1);
    {
      const DeviceGroup group = group_of(GetParam());
      const bool nccl = seed % 5 == 0 && GetParam().size() == 2;  // whose own order of two is the same
      Buckets buckets(group, {.collectives = {.transport = nccl ? Transport::nccl : Transport::copies},
                              .chunk_bytes = seed % 2 == 0 ? std::size_t{25} << 20 : std::size_t{200'000}});
      for (int step = 0; step < 3; ++step) {
        std::vector<std::vector<std::uint32_t>> seeds(group.size());
        std::vector<bool> takes_part(group.size(), true);
        if (step == 1 && group.size() > 2 && !nccl) takes_part[random() % group.size()] = false;
        buckets.begin(takes_part);
        std::vector<DeviceId> devices;
        for (DeviceId d = 0; d < group.size(); ++d) {
          if (takes_part[d]) devices.push_back(d);
        }
        std::shuffle(devices.begin(), devices.end(), random);
        std::vector<std::vector<bool>> sealed(group.size(), std::vector<bool>(std::size(kCounts), false));
        std::vector<std::tuple<DeviceId, std::size_t, void*>> marked;  // sealed later, by an event
        for (const DeviceId d : devices) {
          buckets.queues.enter(d);
          for (std::size_t k = 0; k < std::size(kCounts); ++k) {
            seeds[d].push_back(static_cast<std::uint32_t>(random()));
            ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, seeds[d][k]));
            const auto how = random() % 4;
            if (how == 0) continue;
            sealed[d][k] = true;
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
          if (random() % 2 == 0) sealed[d][k] = false;  // sealed again
          buckets.deliver(d, sealed[d]);
        }
        buckets.end();
        ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(seeds)) << "seed " << seed << ", step " << step;
      }
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

TEST_P(BucketSums, BeginWhileTheDevicesStillCompute) {
  for (std::uint64_t seed = 0; seed < kOrders / 16; ++seed) {
    boot_with_writes(seed, 4);
    {
      const DeviceGroup group = group_of(GetParam());
      Buckets buckets(group, {.collectives = {.transport = Transport::copies}});
      DeviceQueues& queues = buckets.queues;
      buckets.begin();
      std::vector<std::vector<std::uint32_t>> seeds(group.size(), {11, 12, 13});
      std::vector<void*> marks(group.size(), nullptr);
      const bool by_event = seed % 2 == 1;  // of the caller, and sealed when more work is enqueued already
      for (DeviceId d = 0; d < group.size(); ++d) {
        queues.enter(d);
        ASSERT_NO_FATAL_FAILURE(buckets.fill(d, 0, 11));
        if (by_event) {
          marks[d] = buckets.mark(d);
        } else {
          queues.seal(d, 0, buckets.view(d, 0));
        }
      }
      for (DeviceId d = 0; d < group.size(); ++d) {
        ASSERT_NO_FATAL_FAILURE(buckets.fill(d, 1, 12));  // more work, which nobody may wait for
        if (queues.stream(d) != nullptr) {
          const std::unique_ptr<Event> written = queues.maker(queues.space_of(d)).make_event(false);
          queues.stream(d)->record(*written);
          wait_for(*written);
          fake::hang(static_cast<cudaStream_t>(queues.stream(d)->native()));
        }
        ASSERT_NO_FATAL_FAILURE(buckets.fill(d, 2, 13));
      }
      for (DeviceId d = 0; by_event && d < group.size(); ++d) queues.seal(d, 0, buckets.view(d, 0), marks[d]);
      AsyncDevice& home = queues.maker(queues.home_space());
      const std::unique_ptr<Event> summed = home.make_event(false);
      queues.home_stream().record(*summed);
      ASSERT_NO_THROW(wait_for(*summed, std::chrono::seconds(30))) << "seed " << seed;
      for (DeviceId d = 0; d < group.size(); ++d) {
        if (queues.stream(d) != nullptr) fake::go_on(static_cast<cudaStream_t>(queues.stream(d)->native()));
        buckets.deliver(d, {true, false, false});
      }
      buckets.end();
      ASSERT_NO_FATAL_FAILURE(buckets.expect_sums(seeds)) << "seed " << seed;
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, BucketSums,
    ::testing::Values(std::vector<std::string>{"cuda:0/0", "cuda:0/1"}, std::vector<std::string>{"cuda:0", "cuda:1"},
                      std::vector<std::string>{"cuda:2", "cuda:0", "cuda:1"},
                      std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3"},
                      std::vector<std::string>{"host:0", "cuda:1/0", "cuda:1/1", "cuda:0", "cuda:2"}));

TEST(ParametersOfGpus, LeaveHomeOnceAndAreRelayed) {
  for (std::uint64_t seed = 0; seed < kOrders / 8; ++seed) {
    boot_with_writes(seed, 4);
    {
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
        for (DeviceId d = 1; d < 4; ++d) {
          if (!takes_part[d]) continue;
          queues.enter(d, false);
          std::size_t offset = 0;
          for (std::size_t k = 0; k < std::size(kSizes); ++k) {
            queues.need(d, kBucketOf[k]);
            queues.stream(d)->copy(static_cast<float*>(seen[d]->data()) + offset, memory[d][k]->data(),
                                   kSizes[k] * sizeof(float));
            offset += kSizes[k];
          }
          queues.deliver(d, {});
        }
        queues.reduce();
        queues.end_step();
        times->wait();
        for (DeviceId d = 1; d < 4; ++d) {
          std::size_t offset = 0;
          for (std::size_t k = 0; takes_part[d] && k < std::size(kSizes); ++k) {
            std::vector<float> wanted(kSizes[k]);
            write({wanted.data(), kSizes[k], value(k).seed});
            ASSERT_EQ(
                std::memcmp(wanted.data(), static_cast<float*>(seen[d]->data()) + offset, kSizes[k] * sizeof(float)), 0)
                << "seed " << seed << ", step " << step << ", device " << d << ", parameter " << k;
            offset += kSizes[k];
          }
        }
      }
      queues.drain();
      seen.clear();
    }
    ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
    ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  }
}

TEST(BucketSumsOfGpus, AreMadeInSlicesByAllOfThem) {
  boot_with_writes(1, 4);
  const DeviceGroup group = group_of(std::vector<std::string>{"cuda:0", "cuda:1", "cuda:2", "cuda:3"});
  Buckets buckets(group, {.collectives = {.transport = Transport::copies}});
  const std::size_t before = buckets.queues.maker(0).peak_bytes();
  buckets.begin();
  for (DeviceId d = 0; d < group.size(); ++d) {
    buckets.queues.enter(d);
    for (std::size_t k = 0; k < std::size(kCounts); ++k) ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, 7));
    buckets.deliver(d, {false, false, false});
  }
  buckets.end();
  const std::vector<std::uint32_t> same{7, 7, 7};
  ASSERT_NO_FATAL_FAILURE(buckets.expect_sums({same, same, same, same}));
  // Home pulls three quarters of a bucket from others, and no more; all of it would be three buckets.
  EXPECT_LE(buckets.queues.maker(0).peak_bytes() - before, kCounts[0] * sizeof(float));
}

}  // namespace
}  // namespace paceline
