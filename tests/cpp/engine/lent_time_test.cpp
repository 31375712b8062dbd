// SPDX-License-Identifier: Apache-2.0
//
// Steps of devices that do other work between their micro-batches, and the plans that count it.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "host_group.hpp"

namespace paceline {
namespace {

using Shares = std::vector<std::int64_t>;

constexpr double kPart = 0.1;
constexpr double kItem = 10e-6;  // seconds by the clock of `Stamped`
constexpr auto kRequest = std::chrono::milliseconds(1);

/// Other work for one device, which may take a tenth of its time.
class Requests final : public WorkSource {
 public:
  void submit() noexcept { waits_ = true; }
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    if (over_) return NextWork::done();
    return waits_.exchange(false) ? NextWork::take(0) : NextWork::wait();
  }
  void perform(DeviceId, std::int64_t, Turn&) override { std::this_thread::sleep_for(kRequest); }
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override {}
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override {}
  void cancel(std::exception_ptr) noexcept override {
    over_ = true;
    wake_all();
  }
  [[nodiscard]] bool complete() const noexcept override { return over_; }

 private:
  [[nodiscard]] double part() const noexcept override { return kPart; }
  std::atomic<bool> waits_{false};
  std::atomic<bool> over_{false};
};

/// Both devices begin before one of them goes on. In the first micro-batch of the second device a request comes. By the
/// times that the balancer gets, each item takes as long as any other, and a request much more than the part it may.
class Stamped final : public StepProgram {
 public:
  explicit Stamped(Requests* requests) : requests_(requests) {}
  bool run(const MicroBatch& mb) override {
    std::unique_lock lock(mutex_);
    bool& begun = begun_[mb.device.number()];
    if (!begun && mb.device.number() == 1 && requests_ != nullptr) requests_->submit();
    begun = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return begun_[0] && begun_[1]; });
    return false;
  }
  void stamp(std::vector<ClaimRecord>& claims) const override {
    for (ClaimRecord& claim : claims) {
      claim.start_seconds = 0.0;
      claim.finish_seconds = 1000.0;  // later than all that the machine's clock may say
      claim.lent_seconds = 1000.0 - kItem * static_cast<double>(claim.micro_batch.size());
    }
  }

 private:
  Requests* requests_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<bool, 2> begun_{};
};

Shares run(StepLoop& loop, int steps, Requests* requests) {
  for (int k = 0; k < steps; ++k) {
    const auto step = loop.begin(loop.plan(200), std::make_shared<Stamped>(requests));
    step->wait();
    step->rethrow_failure();
    const StepRecord record = step->record();
    EXPECT_EQ(record.lent_parts, requests != nullptr ? std::vector({0.0, kPart}) : std::vector<double>{});
    loop.commit(step);
  }
  return loop.plan(200)->shares;
}

TEST(LentTime, OfADeviceIsCountedByThePlansThatFollow) {
  DeviceGroup group = host_group(2);
  const DeviceId lender = group.ids()[1];
  const auto requests = std::make_shared<Requests>();
  group.open(requests, {.priority = 1}, std::span(&lender, 1));
  StepLoop loop(group, {.micro_batch = 10});
  EXPECT_EQ(run(loop, 20, nullptr), (Shares{100, 100}));
  EXPECT_EQ(loop.explain().find("lends"), std::string::npos);
  EXPECT_EQ(run(loop, 10, requests.get()), (Shares{105, 95}));
  const std::string text = loop.explain();
  EXPECT_NE(text.find("host:1 lends 10 % of its time to requests, which its share counts"), std::string::npos) << text;
  EXPECT_LE(run(loop, 16, nullptr)[0], 101) << loop.explain();  // a move must promise more than 1 %
  requests->cancel({});
}

TEST(LentTime, ToAPoolIsNoMoreThanItsBudget) {
  class Submits final : public StepProgram {
   public:
    explicit Submits(Pool& pool) : pool_(pool) {}
    bool run(const MicroBatch& mb) override {
      if (mb.begin == 0) {
        job = pool_.submit([](Job&) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); },
                           {.priority = Priority::interactive});
      }
      return false;
    }
    std::optional<Future<void>> job;

   private:
    Pool& pool_;
  };
  const DeviceGroup group = host_group(1);
  for (const double budget : {0.01, 0.0}) {
    Pool pool(group, {}, budget);
    const auto program = std::make_shared<Submits>(pool);
    const StepRecord record = run_step(group, program, {.shares = {10}, .micro_batch = 1});
    program->job->get();
    EXPECT_EQ(record.lent_parts, budget > 0.0 ? std::vector({budget}) : std::vector<double>{});
  }
}

}  // namespace
}  // namespace paceline
