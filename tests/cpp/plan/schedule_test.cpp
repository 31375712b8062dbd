// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/schedule.hpp>

#include "errors.hpp"

namespace paceline::plan {
namespace {

std::vector<std::int64_t> depths_of(const Schedule& schedule) {
  std::vector<std::int64_t> depths;
  for (std::size_t i = 0; i < schedule.stages.size(); ++i) depths.push_back(in_flight(schedule, i));
  return depths;
}

// Each forward and each backward once, both in the order of the micro-batches.
void expect_complete(const Schedule& schedule) {
  for (const std::vector<Action>& actions : schedule.stages) {
    std::int64_t forwards = 0;
    std::int64_t backwards = 0;
    for (const Action& action : actions) {
      std::int64_t& count = action.kind == Action::Kind::forward ? forwards : backwards;
      EXPECT_EQ(action.micro_batch, count);
      ++count;
    }
    EXPECT_EQ(forwards, schedule.micro_batches);
    EXPECT_EQ(backwards, schedule.micro_batches);
  }
  EXPECT_NO_THROW(check(schedule));
}

TEST(Schedule, GPipeRunsAllForwardsFirst) {
  EXPECT_EQ(to_text(gpipe(2, 3)), "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2");
  EXPECT_EQ(depths_of(gpipe(3, 5)), (std::vector<std::int64_t>{5, 5, 5}));
}

TEST(Schedule, OneForwardOneBackwardKeepsOneMoreInFlightPerStageBehind) {
  EXPECT_EQ(to_text(one_f_one_b(2, 3)), "F0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2");
  EXPECT_EQ(depths_of(one_f_one_b(4, 8)), (std::vector<std::int64_t>{4, 3, 2, 1}));
  EXPECT_EQ(depths_of(one_f_one_b(4, 2)), (std::vector<std::int64_t>{2, 2, 2, 1}));
}

TEST(Schedule, ExtraWarmUpAddsToThePlainDepthAndRaisesTheStagesBefore) {
  const std::vector<std::int64_t> extra{2, 1, 0};
  EXPECT_EQ(depths_of(one_f_one_b(3, 9, extra)), (std::vector<std::int64_t>{5, 3, 1}));
  const std::vector<std::int64_t> rising{0, 0, 6};
  EXPECT_EQ(depths_of(one_f_one_b(3, 9, rising)), (std::vector<std::int64_t>{7, 7, 7}));
  const std::vector<std::int64_t> huge{INT64_MAX, 0, 0};
  EXPECT_EQ(depths_of(one_f_one_b(3, 9, huge)), (std::vector<std::int64_t>{9, 2, 1}));
}

TEST(Schedule, EveryScheduleRunsEachActionOnceInOrderWithItsDepthsInFlight) {
  for (std::size_t stages = 1; stages <= 4; ++stages) {
    for (std::int64_t count = 1; count <= 5; ++count) {
      expect_complete(gpipe(stages, count));
      expect_complete(one_f_one_b(stages, count));
      std::vector<std::int64_t> depths;
      const std::function<void()> each = [&] {
        if (depths.size() == stages) {
          const Schedule schedule = schedule_of_depths(depths, count);
          expect_complete(schedule);
          EXPECT_EQ(depths_of(schedule), depths);
          EXPECT_EQ(schedule_of(to_text(schedule)), schedule);
          return;
        }
        for (std::int64_t depth = 1; depth <= (depths.empty() ? count : depths.back()); ++depth) {
          depths.push_back(depth);
          each();
          depths.pop_back();
        }
      };
      each();
    }
  }
}

TEST(Schedule, ForwardsAloneSaveNothing) {
  const Schedule schedule = forward_only(2, 3);
  EXPECT_EQ(to_text(schedule), "F0 F1 F2\nF0 F1 F2");
  EXPECT_EQ(depths_of(schedule), (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(schedule_of(to_text(schedule)), schedule);
}

TEST(Schedule, TextMayHaveSpacesAndEmptyLines) {
  EXPECT_EQ(schedule_of("\n  F0  F1 B0 B1\r\n\nF0 B0\tF1 B1\n"), schedule_of("F0 F1 B0 B1\nF0 B0 F1 B1"));
}

TEST(Schedule, RefusesWhatCannotRunAndNamesStageAndAction) {
  const auto reason = [](const char* text) { return message_of([&] { (void)schedule_of(text); }); };
  EXPECT_TRUE(says(reason("F0 X1"), "line 1 of the schedule: 'X1'"));
  EXPECT_TRUE(says(reason("F0 B"), "'B' is no action"));
  EXPECT_TRUE(says(reason("F0 B0x"), "'B0x' is no action"));
  EXPECT_TRUE(says(reason("F0 B-1"), "there is no such micro-batch"));
  EXPECT_TRUE(says(reason("F0 F0 B0 B0"), "stage 0, action F0: it is there twice"));
  EXPECT_TRUE(says(reason("F0 B0\nB0 F0"), "stage 1, action B0: it comes before the forward"));
  EXPECT_TRUE(says(reason("F0 B0 B0"), "stage 0, action B0: it is there twice"));
  EXPECT_TRUE(says(reason("F0 F1 B0 B1\nF0 B0"), "stage 1, action F1: it is missing"));
  EXPECT_TRUE(says(reason("F0 B0\nF0"), "stage 1, action B0: it is missing"));
  EXPECT_TRUE(says(reason("F0\nF0 B0"), "stage 0 runs no backward"));
  EXPECT_TRUE(says(reason("F0 B0 W0"), "stage 0, action W0: weight gradients"));
  EXPECT_TRUE(says(reason("F9223372036854775807"), "'F9223372036854775807' is no action"));
  EXPECT_TRUE(says(reason("F0 F7"), "micro-batch 7"));
  EXPECT_TRUE(says(reason(""), "at least one stage"));
  // Stage 1 wants two forwards before the first backward that stage 0 waits for.
  EXPECT_TRUE(says(reason("F0 B0 F1 B1\nF0 F1 B0 B1"), "stage 0, action B0: it never starts"));
}

TEST(Schedule, RefusesSizesThatMakeNoSense) {
  const std::vector<std::int64_t> two{0, 0};
  const std::vector<std::int64_t> negative{0, -1};
  const std::vector<std::int64_t> rising{1, 2};
  EXPECT_THROW((void)gpipe(0, 1), InvalidArgument);
  EXPECT_THROW((void)gpipe(2, 0), InvalidArgument);
  EXPECT_THROW((void)one_f_one_b(0, 1), InvalidArgument);
  EXPECT_THROW((void)one_f_one_b(3, 4, two), InvalidArgument);
  EXPECT_THROW((void)one_f_one_b(2, 4, negative), InvalidArgument);
  EXPECT_THROW((void)schedule_of_depths(two, 4), InvalidArgument);
  EXPECT_THROW((void)schedule_of_depths(rising, 4), InvalidArgument);
  EXPECT_THROW((void)forward_only(1, -1), InvalidArgument);
  EXPECT_THROW((void)in_flight(gpipe(2, 2), 2), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan
