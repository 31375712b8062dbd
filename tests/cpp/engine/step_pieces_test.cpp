// SPDX-License-Identifier: Apache-2.0
//
// Claims that are worked off in pieces: because memory is limited or runs out, or to find a faster size.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <paceline/balance/ledger.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>

#include "errors.hpp"
#include "host_group.hpp"
#include "piece_program.hpp"

namespace paceline {
namespace {

using piece_tests::kFixed;
using piece_tests::kPerItem;
using piece_tests::PieceProgram;
using piece_tests::run;
using piece_tests::sum;

TEST(MemoryLimit, RunsAsFewPiecesAsFitOnceTwoSizesAreMeasured) {
  constexpr std::int64_t kLimit = kFixed + 10 * kPerItem;
  StepLoop step_loop(host_group(2), {.balance = Balance::even, .memory_limits = {kLimit, 0}});
  const auto program = std::make_shared<PieceProgram>(2);
  run(step_loop, 64, program);
  std::vector<std::int64_t> sizes = program->sizes(0);
  EXPECT_EQ(sizes[0], 2);
  EXPECT_EQ(sizes[1], 4);
  EXPECT_EQ(sum(sizes), 32);
  EXPECT_LE(*std::max_element(sizes.begin(), sizes.end()), 10);
  EXPECT_TRUE(program->ran[0][0].measure);
  EXPECT_FALSE(program->ran[0][0].continues);
  EXPECT_TRUE(program->ran[0][1].continues);
  EXPECT_EQ(program->sizes(1), (std::vector<std::int64_t>{32})) << "the other device has no limit";
  run(step_loop, 64, program);
  EXPECT_EQ(program->sizes(0), (std::vector<std::int64_t>{8, 8, 8, 8}));
  EXPECT_FALSE(program->ran[0][0].measure);
  EXPECT_TRUE(program->ran[0][3].last);
  const std::vector<MemoryReport> report = step_loop.memory_report();
  ASSERT_EQ(report.size(), 1U);
  ASSERT_TRUE(report[0].items);
  EXPECT_EQ(report[0].device, "host:0");
  EXPECT_EQ(report[0].items->fixed_bytes, kFixed);
  EXPECT_EQ(report[0].items->bytes_per_item, kPerItem);
  EXPECT_EQ(report[0].items->largest_micro_batch, 10);
  EXPECT_TRUE(says(step_loop.explain(), "host:0: at most 10 items at once"));
}

TEST(MemoryLimit, HoldsClaimsThatAreTooSmallToBeCut) {
  for (const std::int64_t least : {1, 2}) {
    StepLoop step_loop(host_group(1), {.least_items = least, .memory_limits = {kFixed + 10 * kPerItem}});
    const auto program = std::make_shared<PieceProgram>(1);
    run(step_loop, static_cast<int>(2 * least - 1), program);
    ASSERT_EQ(program->ran[0].size(), 1U);
    EXPECT_TRUE(program->ran[0][0].measure) << "least_items=" << least;
    EXPECT_TRUE(step_loop.memory_report()[0].items);
  }
}

TEST(MemoryLimit, MeasuresEachKindOfBatchByItself) {
  StepLoop step_loop(host_group(1), {.memory_limits = {kFixed + 10 * kPerItem}});
  const auto program = std::make_shared<PieceProgram>(1);
  for (const std::uint64_t kind : {7, 8}) {
    run(step_loop, 64, program, {.memory = kind});
    EXPECT_EQ(program->sizes(0)[0], 4) << kind;
    run(step_loop, 64, program, {.memory = kind});
    EXPECT_EQ(program->sizes(0).size(), 7U) << kind;
  }
}

TEST(MemoryLimit, LooksAtTheNextItemsWhereThereWasNothingToDo) {
  StepLoop step_loop(host_group(1), {.memory_limits = {kFixed + 10 * kPerItem}});
  const auto program = std::make_shared<PieceProgram>(1);
  program->nothing_to_do = true;
  run(step_loop, 64, program);
  EXPECT_TRUE(std::all_of(program->ran[0].begin(), program->ran[0].end() - 1, [](auto& mb) { return mb.measure; }));
  EXPECT_FALSE(step_loop.memory_report()[0].items);
}

TEST(MemoryLimit, IsOfThePaddedCostWhereItemsHaveCosts) {
  StepLoop step_loop(host_group(1), {.memory_limits = {kFixed + 10 * kPerItem}});
  const auto program = std::make_shared<PieceProgram>(1);
  std::vector<double> costs;
  for (int k = 0; k < 60; ++k) costs.push_back(k % 4 + 1);
  for (int step = 0; step < 2; ++step) {
    program->items.clear();
    run(step_loop, costs, program);
    ASSERT_EQ(program->items.size(), costs.size());
    for (const auto& [item, times] : program->items) EXPECT_EQ(times, 1) << item;
  }
  EXPECT_GT(program->ran[0].size(), 1U);
  EXPECT_EQ(program->ran[0][1].items.size(), static_cast<std::size_t>(program->ran[0][1].size()));
  ASSERT_TRUE(step_loop.memory_report()[0].costs);
  EXPECT_FALSE(step_loop.memory_report()[0].items);
}

TEST(OutOfMemory, IsAnsweredBySmallerPiecesOnAllDevicesOfTheMemory) {
  StepLoop step_loop(host_group(2), {.balance = Balance::even});
  const auto program = std::make_shared<PieceProgram>(2, 6);
  run(step_loop, 64, program);
  for (std::size_t d = 0; d < 2; ++d) {
    EXPECT_EQ(program->sizes(d), (std::vector<std::int64_t>{4, 4, 4, 4, 4, 4, 4, 4})) << d;
  }
  EXPECT_EQ(step_loop.metrics().steps, 1);
  const std::string told = step_loop.explain();
  EXPECT_TRUE(says(told, "host: at most 4 items at once, since host:"));
  EXPECT_TRUE(says(told, " ran out of memory with 8."));
}

TEST(OutOfMemory, OfADevicesOwnLimitIsNoOtherDevices) {
  StepLoop step_loop(host_group(2), {.balance = Balance::even});
  const auto program = std::make_shared<PieceProgram>(2, 16);
  const auto step = step_loop.begin(step_loop.plan(64), program);
  step->wait();
  const DeviceId failed = step->failure()->micro_batch->device;
  EXPECT_TRUE(step_loop.shrink(*step, true));
  const auto again = step_loop.begin(step_loop.plan(64), std::make_shared<PieceProgram>(2));
  again->wait();
  EXPECT_EQ(again->pieces() != nullptr, true);
  EXPECT_EQ(again->micro_batches(), 3) << "two on the device that has reached its limit";
  EXPECT_FALSE(again->divided()) << "memory asked for it";
  EXPECT_NE(step_loop.explain().find("host:" + std::to_string(failed.number()) +
                                     ": at most 16 items at once, since it reached"),
            std::string::npos);
}

TEST(OutOfMemory, IsRememberedOfSixtyFourKindsOfBatches) {
  StepLoop step_loop(host_group(1), {});
  for (std::uint64_t kind = 0; kind <= 64; ++kind)
    run(step_loop, 16, std::make_shared<PieceProgram>(1, 4), {.memory = kind});
  const auto ran = [&](std::uint64_t kind) {
    const auto program = std::make_shared<PieceProgram>(1);
    run(step_loop, 16, program, {.memory = kind});
    return program->ran[0].size();
  };
  EXPECT_EQ(ran(0), 1U) << "the first one is forgotten";
  EXPECT_EQ(ran(1), 4U);
  EXPECT_EQ(ran(64), 4U);
  EXPECT_TRUE(says(step_loop.explain(), "items of 63 other shapes have caps of their own"));
}

TEST(OutOfMemory, OfOneItemStands) {
  StepLoop step_loop(host_group(2), {.balance = Balance::even});
  const auto program = std::make_shared<PieceProgram>(2, 0);
  EXPECT_THROW(run(step_loop, 8, program), OutOfMemory);
  EXPECT_EQ(step_loop.metrics().steps, 0);
}

TEST(OutOfMemory, LeavesNoPieceWithFewerItemsThanTheLeast) {
  StepLoop step_loop(host_group(1), {.least_items = 3});
  const auto program = std::make_shared<PieceProgram>(1, 5);
  run(step_loop, 17, program);
  const std::vector<std::int64_t> sizes = program->sizes(0);
  EXPECT_EQ(sum(sizes), 17);
  EXPECT_GE(*std::min_element(sizes.begin(), sizes.end()), 3);
}

double falling_out_of_a_cache(std::int64_t items) { return items > 128 ? 3e-4 : 7.5e-5; }

TEST(MicroBatchSize, IsFoundWhileTrainingAndRunsAgainByTheLedger) {
  std::ostringstream out;
  StepLoop step_loop(host_group(1), {.search_sizes = true});
  step_loop.write_to(std::make_shared<balance::LedgerWriter>(out));
  const auto program = std::make_shared<PieceProgram>(1);
  program->seconds_per_item = falling_out_of_a_cache;
  const std::string found = " items: measured to be ";
  for (int step = 0; step < 60 && step_loop.explain().find(found) == std::string::npos; ++step) {
    run(step_loop, 300, program);
    EXPECT_EQ(sum(program->sizes(0)), 300);
  }
  run(step_loop, 300, program);
  // Four pieces of 75, or half as large where other programs were in the way.
  const std::vector<std::int64_t> sizes = program->sizes(0);
  EXPECT_EQ(sum(sizes), 300);
  EXPECT_LE(*std::ranges::max_element(sizes), 75);
  EXPECT_GE(*std::ranges::min_element(sizes), 300 / 16);
  EXPECT_TRUE(says(step_loop.explain(), found));
  std::string pieces;
  std::int64_t end = 0;
  for (const std::int64_t size : sizes) {
    pieces += (end == 0 ? "[0, " : ", [0, ") + std::to_string(end) + ", " + std::to_string(end + size) + "]";
    end += size;
  }
  EXPECT_NE(out.str().find(R"("pieces": [)" + pieces + "]"), std::string::npos) << pieces;
  EXPECT_NE(out.str().find(R"(, true]]])"), std::string::npos) << "steps on trial are no evidence";
  StepScript script;
  script.claims = {{{.begin = 0, .end = 300}}};
  script.pieces = {{{.begin = 0, .end = 100}, {.begin = 100, .end = 300}}};
  for (auto& list : program->ran) list.clear();
  const auto step = step_loop.prepare(step_loop.plan(300), program, script);
  step->start();
  step->wait();
  EXPECT_EQ(program->sizes(0), (std::vector<std::int64_t>{100, 200}));
}

TEST(Script, WhosePiecesAreNotItsClaimsIsRefused) {
  using Spans = std::vector<std::vector<MicroBatch>>;
  const std::shared_ptr<PieceProgram> program = std::make_shared<PieceProgram>(2);
  StepLoop step_loop(host_group(2), {.balance = Balance::even});
  const Spans claims = {{{.begin = 0, .end = 4}, {.begin = 4, .end = 6}}, {{.begin = 6, .end = 8}}};
  const Spans whole = {{{.begin = 6, .end = 8}}};
  const auto prepare = [&](const Spans& of_first, const Spans& of_others) {
    Spans pieces = of_first;
    pieces.insert(pieces.end(), of_others.begin(), of_others.end());
    return step_loop.prepare(step_loop.plan(8), program, {claims, pieces});
  };
  EXPECT_THROW(static_cast<void>(step_loop.prepare(step_loop.plan(8), program, {{}, claims})), InvalidArgument);
  EXPECT_THROW(prepare({{{.begin = 0, .end = 6}}}, {}), InvalidArgument) << "a list is missing";
  EXPECT_THROW(prepare({{{.begin = 0, .end = 6}}}, whole), InvalidArgument) << "one piece of two claims";
  EXPECT_THROW(prepare({{{.begin = 0, .end = 2}, {.begin = 3, .end = 4}, {.begin = 4, .end = 6}}}, whole),
               InvalidArgument)
      << "item 2 is missing";
  EXPECT_THROW(prepare({{{.begin = 0, .end = 4}, {.begin = 4, .end = 6}, {.begin = 4, .end = 6}}}, whole),
               InvalidArgument)
      << "a piece twice";
  const auto step = prepare({{{.begin = 0, .end = 2}, {.begin = 2, .end = 4}, {.begin = 4, .end = 6}}}, whole);
  step->start();
  step->wait();
  ASSERT_EQ(step->failure(), nullptr);
  EXPECT_EQ(program->sizes(0), (std::vector<std::int64_t>{2, 2, 2}));
}

TEST(StepLoop, TakesOnlyStepsThatItHasPrepared) {
  const DeviceGroup group = host_group(1);
  StepLoop step_loop(group, {});
  const auto step = std::make_shared<Step>(group, std::make_shared<PieceProgram>(1), StepOptions{.shares = {4}});
  EXPECT_THROW(step_loop.commit(step), InvalidArgument);
  EXPECT_THROW(step_loop.commit(nullptr), InvalidArgument);
  EXPECT_THROW(static_cast<void>(step_loop.shrink(*step)), InvalidArgument);
}

TEST(StepPieces, StopWhereTheStepIsCancelled) {
  class Cancelling final : public StepProgram {
   public:
    bool run(const MicroBatch& mb) override {
      if (mb.size() > 4) throw OutOfMemory("as planned");
      ++pieces;
      if (step_loop != nullptr) step_loop->cancel();
      return false;
    }
    int pieces = 0;
    StepLoop* step_loop = nullptr;
  };
  StepLoop step_loop(host_group(1), {});
  const auto program = std::make_shared<Cancelling>();
  for (;;) {
    const auto step = step_loop.begin(step_loop.plan(16), program);
    step->wait();
    if (step->failure() == nullptr) break;
    ASSERT_TRUE(step_loop.shrink(*step));
  }
  ASSERT_EQ(program->pieces, 4);
  program->pieces = 0;
  program->step_loop = &step_loop;
  const auto step = step_loop.begin(step_loop.plan(16), program);
  step->wait();
  EXPECT_EQ(program->pieces, 1);
  EXPECT_THROW(step->rethrow_failure(), Cancelled);
}

TEST(MicroBatchSize, IsFoundForEachSizeOfBatchAndKindOfSpeed) {
  StepLoop step_loop(host_group(1), {.search_sizes = true});
  const auto program = std::make_shared<PieceProgram>(1);
  program->seconds_per_item = falling_out_of_a_cache;
  const auto steps = [&](int count, std::uint64_t speed) {
    for (int step = 0; step < count; ++step) run(step_loop, 300, program, {.speed = speed});
    return program->ran[0].size();
  };
  const auto found = [&] {  // on a busy machine the size may be a half or a quarter of what it is on a calm one
    const std::string text = step_loop.explain();
    return std::ranges::any_of(std::array{"75", "38", "19"}, [&](const char* size) {
      return text.find(std::string("Micro-batches of about ") + size) != std::string::npos;
    });
  };
  for (int step = 0; step < 60 && !found(); ++step) steps(1, 1);
  const std::size_t pieces = steps(1, 1);
  EXPECT_TRUE(pieces == 4 || pieces == 8 || pieces == 16) << pieces;
  EXPECT_TRUE(found());
  EXPECT_EQ(steps(1, 2), 1U) << "nothing is known of another kind";
  EXPECT_EQ(step_loop.explain().find("Micro-batches of about"), std::string::npos) << "explain() is of the last kind";
  EXPECT_EQ(steps(1, 1), pieces);
  for (std::uint64_t speed = 3; speed < 9; ++speed) steps(1, speed);
  EXPECT_EQ(steps(1, 1), pieces) << "eight kinds are remembered";
  for (std::uint64_t speed = 9; speed < 17; ++speed) steps(1, speed);
  EXPECT_EQ(steps(1, 1), 1U) << "the kind that was used longest ago is forgotten";
}

TEST(MicroBatchSize, IsLeftAloneWhereItIsGivenOrNotAskedFor) {
  for (const StepLoopOptions& options : {StepLoopOptions{.micro_batch = 300, .search_sizes = true},
                                         StepLoopOptions{.granularity = 2, .search_sizes = true},
                                         StepLoopOptions{.least_items = 2, .search_sizes = true}, StepLoopOptions{}}) {
    StepLoop step_loop(host_group(1), options);
    const auto program = std::make_shared<PieceProgram>(1);
    program->seconds_per_item = falling_out_of_a_cache;
    for (int step = 0; step < 14; ++step) run(step_loop, 300, program);
    EXPECT_EQ(program->sizes(0), (std::vector<std::int64_t>{300}));
  }
  StepLoop step_loop(host_group(1), {.search_sizes = true});
  const auto program = std::make_shared<PieceProgram>(1);
  program->seconds_per_item = falling_out_of_a_cache;
  for (int step = 0; step < 14; ++step) run(step_loop, 300, program, {.any_size = false});
  EXPECT_EQ(program->sizes(0), (std::vector<std::int64_t>{300}));
}

}  // namespace
}  // namespace paceline
