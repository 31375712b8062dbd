// SPDX-License-Identifier: Apache-2.0
//
// A device on a core that other programs keep busy. The best is to leave the device out. The worker of such a core
// usually comes when all work is done, and sometimes in time. This test plays that with events, because real programs
// share a core by chance, and each system differently.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include <paceline/engine/step_loop.hpp>

#include "host_group.hpp"

namespace paceline {
namespace {

constexpr std::int64_t kBatch = 64;
constexpr std::size_t kBusy = 1;           // the index of the device on the busy core
constexpr std::int64_t kFew = kBatch / 8;  // a quarter of its even share
constexpr int kInTime = 8;                 // its worker comes in time in one of so many steps

class ShareProgram final : public StepProgram {
 public:
  /// Call it before the step starts. The busy device's worker comes before the other device begins (`in_time`), or when
  /// the other device has run everything.
  void come(bool in_time) {
    waits_for_end_ = !in_time;
    waited_for_ = in_time;
  }

  bool run(const MicroBatch& mb) override {
    std::this_thread::sleep_for(std::chrono::microseconds(25) * mb.size());
    return false;
  }

  /// Blocks, like a worker on a busy core.
  const Event* slot(DeviceId device) override {
    if (device != kBusy) {
      if (waited_for_) came_.wait(false);
      return nullptr;
    }
    came_ = true;
    came_.notify_all();
    if (waits_for_end_) over_.wait(false);
    return nullptr;
  }

  void finish(DeviceId device) override {
    if (device == kBusy) return;
    over_ = true;
    over_.notify_all();
  }

 private:
  std::atomic<bool> over_{false};  // the other device has run everything
  std::atomic<bool> came_{false};
  bool waits_for_end_ = false;
  bool waited_for_ = false;
};

/// The items that the busy device was planned to run or has run, whichever is more.
std::int64_t given_to_busy(StepLoop& step_loop, bool in_time) {
  const auto program = std::make_shared<ShareProgram>();
  const auto step = step_loop.prepare(step_loop.plan(kBatch), program);
  const auto& shares = step_loop.last_plan().shares;
  if (std::min(shares[0], shares[1]) > 0) program->come(in_time);  // else there is nobody to wait for
  step->start();
  step->wait();
  step->rethrow_failure();
  step_loop.commit(step);
  return std::max(step_loop.last_plan().shares[kBusy], step->items()[kBusy]);
}

TEST(BusyCore, IsDoneWithoutThoughItsWorkerComesInTimeNowAndThen) {
  StepLoop step_loop(host_group(2), {});
  int steps = 0;
  // Probes ask it now and then whether its core is free again.
  for (int k = 0; k < 400; ++k) {
    const std::int64_t given = given_to_busy(step_loop, k % kInTime == kInTime - 1);
    if (k >= 200 && given > kFew) ++steps;
  }
  RecordProperty("steps_with_work", steps);
  EXPECT_LE(steps, 100) << "of 200\n" << step_loop.explain();
  // Its core is free again: a probe notices.
  std::int64_t given = 0;
  for (int k = 0; k < 1000 && given <= kBatch / 4; ++k) given = given_to_busy(step_loop, true);
  EXPECT_GT(given, kBatch / 4) << step_loop.explain();
}

}  // namespace
}  // namespace paceline
