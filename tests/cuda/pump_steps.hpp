// SPDX-License-Identifier: Apache-2.0
//
// Steps of four GPUs whose sums a thread enqueues, and who has enqueued copies.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.hpp"
#include "sealed_buckets.hpp"

namespace paceline {

inline const std::vector<std::string> kFour{"cuda:0", "cuda:1", "cuda:2", "cuda:3"};
inline const std::vector<std::vector<std::uint32_t>> kSeeds{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {10, 11, 12}};
inline constexpr const char* kThread = "pl sums";

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

}  // namespace paceline
