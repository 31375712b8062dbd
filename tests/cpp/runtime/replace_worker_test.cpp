// SPDX-License-Identifier: Apache-2.0
//
// Workers that are left in a piece of work, and what takes their place.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "host_group.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

// Gives out numbers; the first one hangs until it is let go.
class Numbers final : public WorkSource {
 public:
  explicit Numbers(int count) : left_(count) {}
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    const std::lock_guard lock(mutex_);
    if (left_ == 0) return ended_ ? NextWork::done() : NextWork::wait();
    return NextWork::take(left_--);
  }
  void perform(DeviceId, std::int64_t number, Turn&) override {
    threads.insert(std::this_thread::get_id());
    if (hangs.exchange(false)) {
      inside = true;
      open.get_future().wait();
      inside = false;
    }
    (void)number;
  }
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override { ++finished; }
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override { ++finished; }
  void cancel(std::exception_ptr) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      left_ = 0;
      ended_ = true;
    }
    wake_all();
    wake_caller();
  }
  [[nodiscard]] bool complete() const noexcept override { return ended_; }

  std::atomic<bool> hangs{true};
  std::atomic<bool> inside{false};
  std::atomic<int> finished{0};
  std::promise<void> open;
  std::set<std::thread::id> threads;  // of one device, by one worker at a time

 private:
  std::mutex mutex_;
  int left_;
  std::atomic<bool> ended_{false};
};

void await(const auto& condition) {
  while (!condition()) std::this_thread::sleep_for(milliseconds(1));
}

TEST(ReplaceWorker, AnotherOneTakesUpWhatItHadBegun) {
  const auto numbers = std::make_shared<Numbers>(10);
  DeviceGroup group = host_group(1);
  DeviceGroup other = host_group(1);
  group.open(numbers, {});
  await([&] { return numbers->inside.load(); });
  auto waits = other.async([](const Device&) { return std::this_thread::get_id(); });  // comes to the same worker
  EXPECT_FALSE(group.replace_worker(group.ids()[0], *std::make_shared<Numbers>(1)));
  EXPECT_EQ(waits.wait_for(milliseconds(5)), std::future_status::timeout);
  ASSERT_TRUE(group.replace_worker(group.ids()[0], *numbers));
  await([&] { return numbers->finished == 9; });
  const std::thread::id second = waits.get();
  EXPECT_EQ(numbers->threads.size(), 2U);
  EXPECT_TRUE(numbers->threads.contains(second));
  numbers->open.set_value();
  await([&] { return numbers->finished == 10; });
  EXPECT_EQ(group.async([](const Device&) { return std::this_thread::get_id(); }).get(), second);
  EXPECT_FALSE(group.replace_worker(group.ids()[0], *numbers)) << "it is in no work of this source any more";
  group.close();
  EXPECT_EQ(other.async([](const Device&) { return std::this_thread::get_id(); }).get(), second);
}

TEST(ReplaceWorker, AGroupClosesAtOnceWhileTheOneThatWasLeftGoesOn) {
  const auto numbers = std::make_shared<Numbers>(3);
  DeviceGroup group = host_group(1);
  group.open(numbers, {});
  await([&] { return numbers->inside.load(); });
  ASSERT_TRUE(group.replace_worker(group.ids()[0], *numbers));
  await([&] { return numbers->finished == 2; });
  EXPECT_NO_THROW(group.close());
  EXPECT_TRUE(numbers->inside);
  EXPECT_FALSE(group.replace_worker(group.ids()[0], *numbers));
  numbers->open.set_value();
  await([&] { return numbers->finished == 3; });
}

}  // namespace
}  // namespace paceline
