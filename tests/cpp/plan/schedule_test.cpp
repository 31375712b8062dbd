// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>

#include "errors.hpp"
#include "stage_brute_force.hpp"

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
  EXPECT_TRUE(says(reason("F0 B0 W0"), "'W0' is no action"));
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

using testing::StageCases;

std::vector<StageTimes> random_stages(StageCases& cases, bool links) {
  std::vector<StageTimes> stages(static_cast<std::size_t>(cases.integer(1, 6)));
  for (StageTimes& stage : stages) {
    stage.forward = cases.real(0.1, 2.0);
    stage.backward = cases.real(0.1, 4.0);
    if (links) stage.send_forward = cases.real(0.0, 0.5);
    if (links) stage.send_backward = cases.real(0.0, 0.5);
  }
  return stages;
}

Schedule random_schedule(StageCases& cases, std::size_t stages) {
  const std::int64_t count = cases.integer(1, 10);
  std::vector<std::int64_t> depths(stages);
  for (std::int64_t& depth : depths) depth = cases.integer(1, count);
  std::ranges::sort(depths, std::greater<>());
  return schedule_of_depths(depths, count);
}

TEST(PipelineTime, EqualsASimulationOfEvents) {
  StageCases cases(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<StageTimes> stages = random_stages(cases, true);
    const Schedule schedule = random_schedule(cases, stages.size());
    std::vector<double> scale;
    testing::BatchTimes times;
    for (std::int64_t batch = 0; batch < schedule.micro_batches; ++batch) {
      scale.push_back(cases.real(0.5, 1.5));
      times.push_back(stages);
      for (StageTimes& stage : times.back()) {
        for (double* part : {&stage.forward, &stage.backward, &stage.send_forward, &stage.send_backward})
          *part *= scale.back();
      }
    }
    const PipelineTimes result = pipeline_times(schedule, stages, scale);
    ASSERT_DOUBLE_EQ(result.seconds, testing::simulate(schedule, times));
    // Nothing overlaps on a stage, and nothing starts before its input is there.
    const auto finish = [&](std::size_t stage, Action::Kind kind, std::int64_t batch) {
      for (std::size_t i = 0; i < schedule.stages[stage].size(); ++i)
        if (schedule.stages[stage][i] == Action{kind, batch}) return result.actions[stage][i].finish;
      return std::numeric_limits<double>::infinity();
    };
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      double busy = 0.0;
      double free = 0.0;
      for (std::size_t i = 0; i < schedule.stages[stage].size(); ++i) {
        const auto [kind, batch] = schedule.stages[stage][i];
        const ActionSpan span = result.actions[stage][i];
        const double size = scale[static_cast<std::size_t>(batch)];
        ASSERT_GE(span.start, free);
        free = span.finish;
        busy += span.finish - span.start;
        if (kind == Action::Kind::forward && stage > 0) {
          ASSERT_GE(span.start, finish(stage - 1, kind, batch) + size * stages[stage - 1].send_forward - 1e-12);
        } else if (kind == Action::Kind::backward && stage + 1 < stages.size()) {
          ASSERT_GE(span.start, finish(stage + 1, kind, batch) + size * stages[stage + 1].send_backward - 1e-12);
        }
      }
      ASSERT_NEAR(result.busy_seconds[stage], busy, 1e-9);
    }
  }
}

// sum t + (m - 1) max t bounds 1F1B from above if backwards take the same multiple of forwards on all stages; equality
// where the last stage is the slowest. GPipe is never quicker.
TEST(PipelineTime, OneForwardOneBackwardIsWithinItsBounds) {
  StageCases cases(5);
  int below = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<StageTimes> stages = random_stages(cases, false);
    const std::int64_t count = cases.integer(1, 12);
    const double ratio = cases.real(1.0, 3.0);
    double sum = 0.0;
    double slowest = 0.0;
    for (StageTimes& stage : stages) {
      stage.backward = ratio * stage.forward;
      sum += stage.forward + stage.backward;
      slowest = std::max(slowest, stage.forward + stage.backward);
    }
    const double upper = sum + static_cast<double>(count - 1) * slowest;
    const double seconds = pipeline_times(one_f_one_b(stages.size(), count), stages).seconds;
    ASSERT_LE(seconds, upper + 1e-9);
    ASSERT_LE(seconds, pipeline_times(gpipe(stages.size(), count), stages).seconds + 1e-9);
    if (stages.back().forward + stages.back().backward == slowest) {
      ASSERT_NEAR(seconds, upper, 1e-9);
    } else if (seconds < 0.99 * upper) {
      ++below;
    }
  }
  EXPECT_GT(below, 100);
}

// 4 equal stages and links of a tenth: one more in flight than one per hop there and back hides them in the steady
// state.
TEST(PipelineTime, MoreInFlightHidesLinks) {
  const std::vector<StageTimes> stages(4, {1.0, 1.0, 0.1, 0.1});
  const std::vector<std::int64_t> extra{3, 2, 1, 0};
  const double plain = pipeline_times(one_f_one_b(4, 32), stages).seconds;
  const double deep = pipeline_times(one_f_one_b(4, 32, extra), stages).seconds;
  EXPECT_NEAR(deep, 2 * 31 + 8 + 0.6, 1e-9);
  EXPECT_GT(plain, 1.05 * deep);
}

TEST(PipelineTime, ForwardsAloneTakeOnePassAndTheSlowestStageForEachFurtherOne) {
  const std::vector<StageTimes> stages{{1.0, 9.0, 0.5, 9.0}, {2.0, 9.0, 9.0, 9.0}};
  EXPECT_DOUBLE_EQ(pipeline_times(forward_only(2, 4), stages).seconds, 1.0 + 0.5 + 4 * 2.0);
}

TEST(PipelineTime, NoiseCostsMoreWithFewerInFlight) {
  const std::vector<StageTimes> stages(2, {1.0, 2.0, 0.0, 0.0});
  const std::vector<std::int64_t> more{1, 0};
  const std::vector<double> none(2, 0.0);
  const std::vector<double> noise(2, 0.3);
  const Schedule plain = one_f_one_b(2, 16);
  const Schedule deep = one_f_one_b(2, 16, more);
  EXPECT_DOUBLE_EQ(expected_seconds(plain, stages, none), pipeline_times(plain, stages).seconds);
  EXPECT_DOUBLE_EQ(expected_seconds(deep, stages, none), expected_seconds(plain, stages, none));
  const double with_noise = expected_seconds(plain, stages, noise, 256);
  EXPECT_GT(with_noise, 1.03 * pipeline_times(plain, stages).seconds);
  EXPECT_LT(expected_seconds(deep, stages, noise, 256), 0.99 * with_noise);
  EXPECT_EQ(expected_seconds(plain, stages, noise), expected_seconds(plain, stages, noise));
}

TEST(PipelineTime, NoiseHasMeanOneAndTheGivenDeviation) {
  const std::vector<StageTimes> one{{1.0, 1.0, 0.0, 0.0}};
  const std::vector<double> noise{0.5};
  EXPECT_NEAR(expected_seconds(one_f_one_b(1, 1000), one, noise, 20) / 2000.0, 1.0, 0.01);
  double squares = 0.0;  // of single actions: sample i of a run of one micro-batch is run i + 1 less run i
  double before = 0.0;
  for (std::size_t samples = 1; samples <= 500; ++samples) {
    const double sum = expected_seconds(one_f_one_b(1, 1), one, noise, samples) * static_cast<double>(samples);
    squares += (sum - before - 2.0) * (sum - before - 2.0);
    before = sum;
  }
  EXPECT_NEAR(std::sqrt(squares / 500 / 2), 0.5, 0.05);
}

TEST(PipelineTime, RefusesTimesThatMakeNoSense) {
  const Schedule schedule = gpipe(2, 2);
  std::vector<StageTimes> stages(2, {1.0, 1.0, 0.0, 0.0});
  const std::vector<double> one{1.0};
  const std::vector<double> negative{0.1, -0.1};
  const std::vector<double> fine{0.1, 0.1};
  EXPECT_THROW((void)pipeline_times(gpipe(3, 2), stages), InvalidArgument);
  EXPECT_THROW((void)pipeline_times(schedule, stages, one), InvalidArgument);
  EXPECT_THROW((void)pipeline_times(schedule, stages, negative), InvalidArgument);
  EXPECT_THROW((void)pipeline_times({2, {{}, {}}}, stages), InvalidArgument);
  EXPECT_THROW((void)expected_seconds(schedule, stages, one), InvalidArgument);
  EXPECT_THROW((void)expected_seconds(schedule, stages, negative), InvalidArgument);
  EXPECT_THROW((void)expected_seconds(schedule, stages, fine, 0), InvalidArgument);
  stages[1].send_forward = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW((void)pipeline_times(schedule, stages), InvalidArgument);
}

}  // namespace
}  // namespace paceline::plan
