// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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

}  // namespace
}  // namespace paceline
