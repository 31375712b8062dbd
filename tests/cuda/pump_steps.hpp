// SPDX-License-Identifier: Apache-2.0
//
// Steps of four GPUs whose copies and sums a thread enqueues, who has enqueued copies, and copies that hang.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "sealed_buckets.hpp"

namespace paceline {

inline const std::vector<std::string> kFour{"cuda:0", "cuda:1", "cuda:2", "cuda:3"};
inline const std::vector<std::vector<std::uint32_t>> kSeeds{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {10, 11, 12}};
inline constexpr const char* kThread = "pl sums";
inline constexpr std::chrono::milliseconds kShort(50);

inline void enter_and_fill(Buckets& buckets) {
  for (const DeviceId d : buckets.queues.devices()) {
    buckets.queues.enter(d);
    for (std::size_t k = 0; k < std::size(kCounts); ++k) {
      ASSERT_NO_FATAL_FAILURE(buckets.fill(d, k, kSeeds[d.number()][k]));
    }
  }
}

inline void seal_all(Buckets& buckets) {
  for (std::size_t k = 0; k < std::size(kCounts); ++k) {
    for (const DeviceId d : buckets.queues.devices()) buckets.queues.seal(d, k, buckets.view(d, k));
  }
}

inline void deliver_all(Buckets& buckets) {
  for (const DeviceId d : buckets.queues.devices()) buckets.deliver(d, {true, true, true});
}

/// A step up to its reduction, on this thread.
inline void begin_and_seal(Buckets& buckets) {
  buckets.begin();
  ASSERT_NO_FATAL_FAILURE(enter_and_fill(buckets));
  seal_all(buckets);
  deliver_all(buckets);
}

inline void expect_a_step(Buckets& buckets) {
  ASSERT_NO_FATAL_FAILURE(begin_and_seal(buckets));
  buckets.end();
  const auto count = static_cast<std::ptrdiff_t>(buckets.queues.devices().size());
  ASSERT_NO_FATAL_FAILURE(buckets.expect_sums({kSeeds.begin(), kSeeds.begin() + count}));
}

inline void await_the_pump(const Buckets& buckets) { static_cast<void>(buckets.queues.copy_stream(1)); }

/// Which threads enqueue copies, from now until its end.
class Copiers {
 public:
  Copiers() {
    fake::set_before_copy([this] {
      const std::lock_guard lock(mutex_);
      threads_.insert(std::this_thread::get_id());
      ++count_;
      return cudaSuccess;
    });
  }
  ~Copiers() { fake::set_before_copy(nullptr); }
  Copiers(const Copiers&) = delete;
  Copiers& operator=(const Copiers&) = delete;

  [[nodiscard]] std::set<std::thread::id> threads() const {
    const std::lock_guard lock(mutex_);
    return threads_;
  }
  [[nodiscard]] int count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::thread::id> threads_;
  int count_ = 0;
};

/// One copy of a step does not come back until this says so.
class HangingCopy {
 public:
  ~HangingCopy() { fake::set_before_copy(nullptr); }
  HangingCopy() = default;
  HangingCopy(const HangingCopy&) = delete;
  HangingCopy& operator=(const HangingCopy&) = delete;

  /// The copy with this number from now on. Making queues copies, too.
  void arm(int which, cudaError_t result = cudaSuccess) {
    fake::set_before_copy([this, which, result] {
      if (copies++ != which) return cudaSuccess;
      EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
      hangs = true;
      while (!comes_back) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return result;
    });
  }

  void await() const {
    while (!hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  /// The pump has freed what it used.
  void end() {
    comes_back = true;
    await_the_thread(kThread);
  }

  std::atomic<int> copies{0};
  int device = -1;
  std::atomic<bool> hangs{false};
  std::atomic<bool> comes_back{false};
};

/// From now on work is enqueued and does not run.
inline void hang_all_streams(const DeviceQueues& queues) {
  for (const DeviceId d : queues.devices()) fake::hang(queues.stream(d)->native());
  for (std::size_t s = 1; s < queues.space_count(); ++s) fake::hang(queues.copy_stream(s)->native());
  fake::hang(queues.home_stream().native());
}

}  // namespace paceline
