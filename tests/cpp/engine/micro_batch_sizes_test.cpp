// SPDX-License-Identifier: Apache-2.0
//
// Micro-batches that are short enough for work of higher priority, or large enough for what their program needs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>

#include "engine/step/short_pieces.hpp"
#include "errors.hpp"
#include "host_group.hpp"
#include "piece_program.hpp"

namespace paceline {
namespace {

using piece_tests::PieceProgram;
using piece_tests::run;
using piece_tests::sum;

/// Runs claims of so many items, each of whose pieces takes `fixed` + `per_item` * n seconds. Returns the sizes of the
/// last claim.
std::vector<std::int64_t> cut_for(internal::ShortPieces& shorter, double fixed, double per_item, std::int64_t items,
                                  int claims, std::optional<std::int64_t> most = std::nullopt) {
  std::vector<std::int64_t> sizes;
  for (int claim = 0; claim < claims; ++claim) {
    sizes.clear();
    std::int64_t at = 7;
    for (const auto& [begin, end] : shorter.pieces(DeviceId(0), 7, 7 + items, 0.0205, most)) {
      EXPECT_EQ(begin, at);
      EXPECT_GT(end, begin);
      at = end;
      sizes.push_back(end - begin);
      shorter.ran(DeviceId(0), end - begin, fixed + per_item * static_cast<double>(end - begin));
    }
    EXPECT_EQ(at, 7 + items);
  }
  return sizes;
}

TEST(ShortPieces, EndWithinTheirTimeAndComeDownFromWholeClaimsByHalves) {
  const std::vector<DeviceId> devices{DeviceId(0)};
  internal::ShortPieces shorter(devices);
  EXPECT_EQ(cut_for(shorter, 0.004, 0.001, 1000, 1), (std::vector<std::int64_t>{400, 400, 200}));
  const std::vector<std::int64_t> second = cut_for(shorter, 0.004, 0.001, 1000, 1);
  EXPECT_EQ(shorter.size(DeviceId(0)), 100) << "half of the fewest that were measured";
  EXPECT_LE(*std::ranges::max_element(second), 100);
  const std::vector<std::int64_t> sizes = cut_for(shorter, 0.004, 0.001, 1000, 10);
  EXPECT_EQ(shorter.size(DeviceId(0)), 16);
  EXPECT_EQ(*std::ranges::max_element(sizes), 16);
  EXPECT_EQ(cut_for(shorter, 0.004, 0.001, 3, 1), (std::vector<std::int64_t>{3})) << "a correction is short already";
  const std::vector<std::int64_t> slower = cut_for(shorter, 0.004, 0.004, 1000, 10);
  EXPECT_EQ(*std::ranges::max_element(slower), 4) << "the device became slower";
  const std::vector<std::int64_t> faster = cut_for(shorter, 0.004, 0.001, 1000, 10);
  EXPECT_EQ(*std::ranges::max_element(faster), 16);
  const std::vector<std::int64_t> searched = cut_for(shorter, 0.004, 0.001, 1000, 1, 8);
  EXPECT_EQ(*std::ranges::max_element(searched), 8) << "a size that is faster";
}

TEST(ShortPieces, AreNoShorterThanTwiceWhatDoesNotDependOnTheItems) {
  const std::vector<DeviceId> devices{DeviceId(0)};
  internal::ShortPieces shorter(devices);
  const std::vector<std::int64_t> sizes = cut_for(shorter, 0.15, 0.01, 40, 10);
  EXPECT_EQ(shorter.size(DeviceId(0)), 15) << "not single items of 0.16 s each";
  EXPECT_EQ(*std::ranges::max_element(sizes), 12) << "three of two lengths, and half a one";
  internal::ShortPieces single(devices);
  EXPECT_EQ(cut_for(single, 0.0, 0.1, 4, 10), (std::vector<std::int64_t>{1, 1, 1, 1}));
  internal::ShortPieces few(devices);
  EXPECT_EQ(cut_for(few, 0.001, 0.001, 3, 1), (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(cut_for(few, 0.001, 0.001, 3, 1), (std::vector<std::int64_t>{3})) << "there was only one length before";
}

TEST(ShortPieces, AreRunByStepsOfFreeSizesOnly) {
  const auto pieces = [](const StepLoopOptions& options, const BatchKind& kind, double seconds) {
    StepLoop step_loop(host_group(2), options);
    const auto program = std::make_shared<PieceProgram>(2);
    program->seconds_per_item = [](std::int64_t) { return 1e-3; };
    step_loop.set_longest(seconds);
    run(step_loop, 64, program, kind);
    EXPECT_EQ(sum(program->sizes(0)) + sum(program->sizes(1)), 64);
    return program->ran[0].size() + program->ran[1].size();
  };
  EXPECT_EQ(pieces({.balance = Balance::even}, {}, 1e-3), 6U) << "three on each device";
  EXPECT_EQ(pieces({.balance = Balance::even}, {}, 0.0), 2U);
  EXPECT_EQ(pieces({.balance = Balance::even, .micro_batch = 32}, {}, 1e-3), 2U);
  EXPECT_EQ(pieces({.balance = Balance::even, .granularity = 2}, {}, 1e-3), 2U);
  EXPECT_EQ(pieces({.balance = Balance::even, .least_items = 2}, {}, 1e-3), 2U);
  EXPECT_EQ(pieces({.balance = Balance::even}, {.any_size = false}, 1e-3), 2U);
  StepLoop step_loop(host_group(1), {});
  EXPECT_THROW(step_loop.set_longest(-1.0), InvalidArgument);
}

TEST(ShortPieces, AreSaidAndEndWithTheirReason) {
  StepLoop step_loop(host_group(1), {});
  const auto program = std::make_shared<PieceProgram>(1);
  program->seconds_per_item = [](std::int64_t) { return 1e-3; };
  step_loop.set_longest(2e-3);
  const std::string said = " on host:0, to end within 2 ms.";
  for (int step = 0; step < 100 && step_loop.explain().find(said) == std::string::npos; ++step)
    run(step_loop, 8, program);
  EXPECT_TRUE(says(step_loop.explain(), said));
  step_loop.set_longest(0.0);
  run(step_loop, 8, program);
  EXPECT_EQ(program->sizes(0), (std::vector<std::int64_t>{8}));
  EXPECT_FALSE(says(step_loop.explain(), said));
}

/// Counts how often each item runs. The devices are slow in turn, so that work changes hands.
class Counted final : public StepProgram {
 public:
  Counted(std::int64_t batch_size, DeviceId slow) : slow_(slow), times_(static_cast<std::size_t>(batch_size)) {}
  bool run(const MicroBatch& mb) override {
    for (std::int64_t k = mb.begin; k < mb.end; ++k) ++times_[static_cast<std::size_t>(k)];
    const int spins = mb.device == slow_ ? 20000 : 1000;
    for (std::atomic<int> spun = 0; spun < spins; ++spun) {
    }
    return false;
  }
  [[nodiscard]] bool all_once() const {
    return std::all_of(times_.begin(), times_.end(), [](const auto& times) { return times == 1; });
  }

 private:
  DeviceId slow_;
  std::vector<std::atomic<int>> times_;
};

void step(StepLoop& step_loop, std::int64_t batch_size, bool costs, std::int64_t least) {
  const auto program = std::make_shared<Counted>(
      batch_size, step_loop.group().ids()[static_cast<std::size_t>(batch_size) % step_loop.group().size()]);
  std::shared_ptr<Step> step;
  if (costs) {
    std::vector<double> lengths(static_cast<std::size_t>(batch_size));
    std::iota(lengths.begin(), lengths.end(), 1.0);
    step = step_loop.begin(step_loop.plan(lengths), program);
  } else {
    step = step_loop.begin(step_loop.plan(batch_size), program);
  }
  step->wait();
  step->rethrow_failure();
  step_loop.commit(step);
  EXPECT_TRUE(program->all_once());
  for (const ClaimRecord& claim : step->record().claims) {
    EXPECT_GE(claim.micro_batch.size(), std::min(least, batch_size));
  }
}

TEST(LeastMicroBatch, HoldsForBatchesOfAllSizesWithCostsAndWithout) {
  for (std::size_t devices = 1; devices <= 4; ++devices) {
    const DeviceGroup group = host_group(devices);
    for (const Balance balance : {Balance::automatic, Balance::even}) {
      const std::vector<std::pair<std::int64_t, std::int64_t>> sizes{{0, 1}, {0, 3}, {1, 1}, {2, 1}, {3, 3}, {4, 2}};
      for (const auto& [micro_batch, granularity] : sizes) {
        for (const bool costs : {false, true}) {
          StepLoopOptions options{
              .balance = balance, .micro_batch = micro_batch, .granularity = granularity, .least_items = 2};
          if (micro_batch == 0 && options.balance == Balance::automatic) options.corrections = true;
          StepLoop step_loop(group, options);
          const std::int64_t least = micro_batch == 1 ? 1 : 2;
          for (const std::int64_t batch_size : {1, 2, 3, 5, 8, 13, 24, 39}) {  // the queues are tested with all sizes
            SCOPED_TRACE(testing::Message()
                         << devices << " devices, " << name_of(balance) << ", micro_batch " << micro_batch
                         << ", granularity " << granularity << ", batch " << batch_size << (costs ? " by cost" : ""));
            for (int k = 0; k < 2; ++k) step(step_loop, batch_size, costs, least);
          }
        }
      }
    }
  }
}

TEST(LeastMicroBatch, MayChangeBetweenSteps) {
  StepLoop step_loop(host_group(3), {.balance = Balance::even});
  step(step_loop, 3, false, 1);
  EXPECT_EQ(step_loop.last_plan().shares, (std::vector<std::int64_t>{1, 1, 1}));
  step_loop.set_least_items(2);
  step(step_loop, 3, false, 2);
  EXPECT_EQ(step_loop.last_plan().shares, (std::vector<std::int64_t>{3, 0, 0}));
  step(step_loop, 5, true, 2);
  step_loop.set_least_items(1);
  step(step_loop, 3, false, 1);
  EXPECT_EQ(step_loop.last_plan().shares, (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_THROW(step_loop.set_least_items(0), InvalidArgument);
  EXPECT_THROW(step_loop.set_corrections(true), InvalidArgument) << "they need balance 'auto'";
  step_loop.set_corrections(false);
  step_loop.set_corrections(std::nullopt);
}

/// Items take random times, so that devices finish at different times.
class Unsteady final : public StepProgram {
 public:
  bool run(const MicroBatch& mb) override {
    const int factor = 1 + (calls_++ * 7) % 5;
    std::this_thread::sleep_for(std::chrono::microseconds(50) * factor * mb.size());
    return false;
  }

 private:
  std::atomic<int> calls_ = 0;
};

TEST(LeastMicroBatch, CorrectionsComeAndGo) {
  StepLoop step_loop(host_group(2), {});
  const auto program = std::make_shared<Unsteady>();
  const auto most_claims = [&](int steps, std::size_t enough) {
    std::size_t most = 0;
    for (int k = 0; k < steps && most < enough; ++k) {
      const std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(40), program);
      step->wait();
      step->rethrow_failure();
      step_loop.commit(step);
      most = std::max(most, step_loop.last_step().claims.size());
    }
    return most;
  };
  EXPECT_GT(most_claims(2000, 3), 2U);
  step_loop.set_corrections(false);
  EXPECT_LE(most_claims(20, 3), 2U) << "one micro-batch for each device";
  step_loop.set_corrections(std::nullopt);
  EXPECT_GT(most_claims(2000, 3), 2U);
}

}  // namespace
}  // namespace paceline
