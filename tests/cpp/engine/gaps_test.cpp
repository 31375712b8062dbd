// SPDX-License-Identifier: Apache-2.0
//
// A step whose gaps a source of lower priority fills with single jobs, and the plans that count what its devices lend.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "host_group.hpp"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

void spin(std::chrono::microseconds time) {
  const auto end = Clock::now() + time;
  while (Clock::now() < end) {
  }
}

struct Span {
  Clock::time_point begin;
  Clock::time_point end;
};

/// A queue of jobs for all devices.
class Queue final : public WorkSource {
 public:
  Queue(int jobs, std::size_t devices) : left_(jobs), unfinished_(jobs), ran(devices) {}
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    return left_.fetch_sub(1) > 0 ? NextWork::take(0) : NextWork::done();
  }
  void perform(DeviceId, std::int64_t, Turn&) override { spin(std::chrono::microseconds(50)); }
  void done(DeviceId device, std::int64_t, const WorkTiming& timing) noexcept override {
    ran[device.number()].push_back({timing.start, timing.finish});
    --unfinished_;
    wake_caller();
  }
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override {}
  void cancel(std::exception_ptr) noexcept override { left_ = 0; }
  [[nodiscard]] bool complete() const noexcept override { return unfinished_ == 0; }

 private:
  std::atomic<int> left_;
  std::atomic<int> unfinished_;

 public:
  std::vector<std::vector<Span>> ran;  // each worker writes only its own entry
};

/// Sums that depend on the order of the additions on a device.
class Sums final : public StepProgram {
 public:
  explicit Sums(std::size_t devices) : ran(devices), sums_(devices) {}
  bool run(const MicroBatch& mb) override {
    const auto begin = Clock::now();
    for (std::int64_t k = mb.begin; k < mb.end; ++k) sums_[mb.device.number()] += std::sin(static_cast<double>(k));
    spin(std::chrono::microseconds(20) * mb.size());
    ran[mb.device.number()].push_back({begin, Clock::now()});
    return false;
  }
  std::vector<ReductionSegment> reduction() override {
    ReductionSegment segment{.output = &total, .count = 1, .dtype = DType::float64};
    for (const double& sum : sums_) segment.inputs.push_back(&sum);
    return {segment};
  }
  double total = 0.0;
  std::vector<std::vector<Span>> ran;

 private:
  std::vector<double> sums_;
};

TEST(Gaps, AreFilledBetweenMicroBatchesAndTheStepIsTheSameToTheBit) {
  const DeviceGroup group = host_group(2);
  // The second device finishes early, and then has nothing to do until the first one finishes.
  const StepOptions options{.shares = {60, 10}, .micro_batch = 5, .stealing = false};
  const auto alone = std::make_shared<Sums>(2);
  run_step(group, alone, options);
  int in_the_gaps = 0;
  for (int round = 0; round < 5 || (in_the_gaps == 0 && round < 200); ++round) {
    DeviceGroup workers = group;
    const auto jobs = std::make_shared<Queue>(200, 2);
    workers.open(jobs, {.priority = -1});
    const auto program = std::make_shared<Sums>(2);
    run_step(group, program, options);
    EXPECT_EQ(program->total, alone->total);
    ASSERT_TRUE(workers.wait(*jobs));
    EXPECT_EQ(jobs->ran[0].size() + jobs->ran[1].size(), 200U) << "each job once";
    const Clock::time_point step_end = program->ran[0].back().end;
    for (std::size_t d = 0; d < 2; ++d) {
      const std::vector<Span>& steps = program->ran[d];
      for (const Span& job : jobs->ran[d]) {
        const bool between = job.begin > steps.front().begin && job.begin < steps.back().begin;
        EXPECT_FALSE(between) << "a job ran while the step had work for the device";
        in_the_gaps += job.begin > steps.back().end && job.end < step_end ? 1 : 0;
      }
    }
  }
  EXPECT_GT(in_the_gaps, 0);
}

/// Notes its pieces. During the first one a call of higher priority is made.
class Interrupted final : public StepProgram {
 public:
  Interrupted(DeviceGroup group, std::vector<std::string>& order) : group_(std::move(group)), order_(order) {}
  bool run(const MicroBatch& mb) override {
    order_.push_back(std::to_string(mb.begin) + (mb.continues ? " goes on" : " begins"));
    if (mb.begin == 0) {
      call = group_.async(
          [this](const Device&) {
            order_.emplace_back("call");
            spin(std::chrono::milliseconds(1));
          },
          1);
    }
    return false;
  }
  std::future<void> call;

 private:
  DeviceGroup group_;
  std::vector<std::string>& order_;
};

TEST(Gaps, BetweenThePiecesOfAClaimAreForWorkOfHigherPriority) {
  const DeviceGroup group = host_group(1);
  StepLoop loop(group, {});
  std::vector<std::string> order;
  const auto program = std::make_shared<Interrupted>(group, order);
  const std::vector<std::vector<MicroBatch>> claims{{{.begin = 0, .end = 6}}};
  const std::vector<std::vector<MicroBatch>> pieces{
      {{.begin = 0, .end = 2}, {.begin = 2, .end = 4}, {.begin = 4, .end = 6}}};
  const auto step = loop.prepare(loop.plan(6), program, {claims, pieces});
  step->start();
  ASSERT_TRUE(step->wait());
  step->rethrow_failure();
  program->call.get();
  EXPECT_EQ(order, (std::vector<std::string>{"0 begins", "call", "2 goes on", "4 goes on"}));
  const StepRecord record = step->record();
  ASSERT_EQ(record.claims.size(), 1U);
  EXPECT_FALSE(record.claims[0].excluded);
  EXPECT_GT(record.claims[0].lent_seconds, 0.0) << "the call's time is not the claim's";
  EXPECT_TRUE(record.lent_parts.empty()) << "a call is not a part of the time that a plan could count";
  EXPECT_EQ(record.timings(group.ids()).devices[0][0].seconds, record.claims[0].seconds());
}

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
