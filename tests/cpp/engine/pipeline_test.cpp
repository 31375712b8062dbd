// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/engine/pipeline.hpp>
#include <paceline/error.hpp>

#include "block_model.hpp"
#include "errors.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

using PipelineTrainer = BasicPipeline<double>;
using Piece = BasicBlockRun<double>;
using Parameters = std::vector<std::vector<double>>;

const BlockModel kModel({3, 5, 4, 6, 2, 3, 4});  // six blocks

std::vector<plan::BlockCost> equal_costs(std::size_t blocks) {
  return std::vector<plan::BlockCost>(blocks, {.forward_per_item = 1e-3, .backward_per_item = 2e-3});
}

Parameters initialise(PipelineTrainer& trainer, const BlockModel& model = kModel) {
  Parameters all;
  for (std::size_t b = 0; b < model.size(); ++b) {
    model.initialise(b, trainer.parameters(b));
    all.emplace_back(trainer.parameters(b).begin(), trainer.parameters(b).end());
  }
  return all;
}

double forward(const Piece& run) { return kModel.forward(run); }
void backward(const Piece& run) { kModel.backward(run); }

void expect_equals_one_device(PipelineTrainer& trainer, const Parameters& parameters, double loss) {
  const BlockModel::Reference reference = kModel.reference(parameters, trainer.plan().sizes);
  EXPECT_EQ(loss, reference.loss);
  for (std::size_t b = 0; b < kModel.size(); ++b) {
    const std::vector<double> gradients(trainer.gradients(b).begin(), trainer.gradients(b).end());
    EXPECT_EQ(gradients, reference.gradients[b]) << "block " << b;
  }
}

TEST(Pipeline, HasTheGradientOfOneDeviceToTheBitForAnyCutsOrderDepthAndSizes) {
  const DeviceGroup group = host_group(4);
  std::mt19937_64 rng(3);
  for (int round = 0; round < 60; ++round) {
    PipelineOptions options{.blocks = kModel.blocks(), .batch_size = 11, .costs = equal_costs(kModel.size())};
    const std::size_t stages = 1 + rng() % 4;
    std::set<std::size_t> cuts{0};
    while (cuts.size() < stages) cuts.insert(rng() % kModel.size());
    options.stages.cuts.assign(cuts.begin(), cuts.end());
    options.stages.order = {0, 1, 2, 3};
    std::shuffle(options.stages.order.begin(), options.stages.order.end(), rng);
    options.stages.order.resize(stages);
    options.stages.micro_batches = static_cast<std::int64_t>(1 + rng() % 8);
    options.stages.schedule = rng() % 2 == 0 ? plan::StageOptions::Kind::gpipe : plan::StageOptions::Kind::one_f_one_b;
    PipelineTrainer trainer(group, options);
    const Parameters parameters = initialise(trainer);
    for (const std::int64_t batch : {11, 8, 17}) {
      const double loss = trainer.step(batch, forward, backward).value();
      SCOPED_TRACE(plan::to_text(trainer.plan().schedule));
      EXPECT_EQ(trainer.plan().cuts, options.stages.cuts);
      EXPECT_EQ(trainer.plan().order, options.stages.order);
      expect_equals_one_device(trainer, parameters, loss);
    }
  }
}

TEST(Pipeline, TrainsAsOneDeviceWhileItMeasuresAndMoves) {
  const DeviceGroup group = host_group(3);
  PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = 12});
  Parameters parameters = initialise(trainer);
  std::set<std::vector<std::size_t>> orders;
  int measuring = 0;
  for (int step = 0; step < 12; ++step) {
    measuring += trainer.measuring() ? 1 : 0;
    const double loss = trainer.step(12, forward, backward).value();
    orders.insert(trainer.plan().order);
    ASSERT_NO_FATAL_FAILURE(expect_equals_one_device(trainer, parameters, loss)) << "step " << step;
    trainer.update([&](const BasicBlockUpdate<double>& one) {
      for (std::size_t k = 0; k < one.parameters.size(); ++k) one.parameters[k] -= 0.1 * one.gradients[k];
      one.state[0] += 1.0;
    });
    for (std::size_t b = 0; b < kModel.size(); ++b) {
      for (std::size_t k = 0; k < parameters[b].size(); ++k) parameters[b][k] -= 0.1 * trainer.gradients(b)[k];
      ASSERT_EQ(trainer.state(b)[0], step + 1.0);
    }
  }
  EXPECT_EQ(measuring, 3) << "two orders, and another size";
  EXPECT_GE(orders.size(), 2U) << "each block ran on two devices";
}

TEST(Pipeline, AFailedStepCommitsNothingNamesThePlaceAndTheNextStepWorks) {
  const DeviceGroup group = host_group(3);
  PipelineOptions options{.blocks = kModel.blocks(), .batch_size = 12, .costs = equal_costs(kModel.size())};
  options.stages.cuts = {0, 2, 4};
  options.stages.order = {2, 0, 1};
  options.stages.micro_batches = 4;
  PipelineTrainer trainer(group, options);
  const Parameters parameters = initialise(trainer);
  trainer.step(12, forward, backward);
  for (const bool in_backward : {false, true}) {
    for (std::size_t block = 0; block < kModel.size(); ++block) {
      const auto fail = [&](const Piece& run) {
        if (run.block == block && run.micro_batch == 2) throw std::out_of_range("no such row");
      };
      try {
        trainer.step(
            12,
            [&](const Piece& run) {
              if (!in_backward) fail(run);
              return kModel.forward(run);
            },
            [&](const Piece& run) {
              if (in_backward) fail(run);
              kModel.backward(run);
            });
        FAIL() << "expected an error";
      } catch (const Error& error) {
        const std::size_t stage = block / 2;
        EXPECT_TRUE(says(error, "block " + std::to_string(block) + " of stage " + std::to_string(stage)));
        EXPECT_TRUE(says(error, "(blocks " + std::to_string(2 * stage) + " to " + std::to_string(2 * stage + 1) + ")"));
        EXPECT_TRUE(says(
            error, in_backward ? "backward of micro-batch 2, items [6, 9)" : "forward of micro-batch 2, items [6, 9)"));
        EXPECT_TRUE(says(error, "no such row"));
        EXPECT_EQ(error.device(), group.devices()[options.stages.order[stage]].name);
        EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
      }
      const auto reference = kModel.reference(parameters, {3, 3, 3, 3});
      for (std::size_t b = 0; b < kModel.size(); ++b) {
        EXPECT_TRUE(std::ranges::equal(trainer.gradients(b), reference.gradients[b])) << "those of the step before";
      }
      ASSERT_NO_FATAL_FAILURE(
          expect_equals_one_device(trainer, parameters, trainer.step(12, forward, backward).value()));
    }
  }
}

/// Counts the micro-batches that are in flight on each stage.
class InFlight {
 public:
  void enter() {
    const int now = ++now_;
    int most = most_;
    while (now > most && !most_.compare_exchange_weak(most, now)) {
    }
  }
  void leave() { --now_; }
  [[nodiscard]] int now() const { return now_; }
  void reset() { now_ = most_ = 0; }
  [[nodiscard]] int most() const { return most_; }

 private:
  std::atomic<int> now_{0};
  std::atomic<int> most_{0};
};

TEST(Pipeline, RunsAStepAgainWithFewerInFlightAndThenWithOtherCutsWhenMemoryRunsOut) {
  const DeviceGroup group = host_group(2);
  PipelineOptions options{.blocks = kModel.blocks(), .batch_size = 12, .costs = equal_costs(kModel.size())};
  options.stages.micro_batches = 6;
  PipelineTrainer trainer(group, options);
  const Parameters parameters = initialise(trainer);
  trainer.step(12, forward, backward);
  const std::int64_t before = plan::in_flight(trainer.plan().schedule, 0);
  ASSERT_GT(before, 1);

  InFlight first;  // of the first block
  const auto counted = [&](std::function<bool(const Piece&)> too_much) {
    return [&first, too_much](const Piece& run) {
      if (run.block == 0) first.enter();
      if (too_much(run)) {
        first.reset();
        throw std::bad_alloc();
      }
      return kModel.forward(run);
    };
  };
  const auto leave = [&](const Piece& run) {
    if (run.block == 0) first.leave();
    kModel.backward(run);
  };
  double loss = trainer.step(12, counted([&](const Piece&) { return first.now() > 1; }), leave).value();
  EXPECT_EQ(plan::in_flight(trainer.plan().schedule, 0), 1) << "fewer in flight";
  EXPECT_EQ(first.most(), 1);
  expect_equals_one_device(trainer, parameters, loss);

  const auto cuts = trainer.plan().cuts;
  const DeviceId small = group.ids()[trainer.plan().order[0]];
  loss =
      trainer.step(12, counted([&](const Piece& run) { return run.device == small && run.block > 1; }), leave).value();
  EXPECT_NE(trainer.plan().cuts, cuts) << "other cuts";
  expect_equals_one_device(trainer, parameters, loss);

  EXPECT_THROW(trainer.step(12, [](const Piece&) -> double { throw std::bad_alloc(); }, backward), OutOfMemory);
}

TEST(Pipeline, HoldsNoMoreThanItsDevicesMay) {
  const DeviceGroup group = host_group(2);
  const BlockModel model({24, 40, 24, 40, 24, 40, 24});  // so large that rounding up to whole places does not matter
  PipelineOptions options{.blocks = model.blocks(), .batch_size = 64, .costs = equal_costs(model.size())};
  options.stages.micro_batches = 4;
  const auto fore = [&](const Piece& run) { return model.forward(run); };
  const auto back = [&](const Piece& run) { model.backward(run); };
  PipelineTrainer free(group, options);
  free.step(64, fore, back);
  ASSERT_EQ(free.plan().bytes.size(), 2U);
  const std::int64_t limit = 9 * *std::ranges::max_element(free.plan().bytes) / 10;
  options.memory_limits = {limit, limit};
  PipelineTrainer limited(group, options);
  const Parameters parameters = initialise(limited, model);
  const double loss = limited.step(64, fore, back).value();
  EXPECT_LE(*std::ranges::max_element(limited.plan().bytes), limit);
  EXPECT_LT(plan::in_flight(limited.plan().schedule, 0), plan::in_flight(free.plan().schedule, 0));
  const auto reference = model.reference(parameters, limited.plan().sizes);
  EXPECT_EQ(loss, reference.loss);
  EXPECT_TRUE(std::ranges::equal(limited.gradients(3), reference.gradients[3]));

  // The planner does not know that each place begins at a multiple of 256 bytes. What does not fit then is not run.
  PipelineOptions tiny{.blocks = kModel.blocks(), .batch_size = 4, .costs = equal_costs(kModel.size())};
  tiny.memory_limits = {4000, 4000};
  PipelineTrainer small(group, tiny);
  const auto error = thrown_by<OutOfMemory>([&] { small.step(4, forward, backward); });
  EXPECT_TRUE(says(error, "may hold 4000 bytes"));

  options.memory_limits = {1000, 1000};
  EXPECT_THROW(PipelineTrainer(group, options), OutOfMemory);
}

TEST(Pipeline, ARetiredDeviceHasNoStage) {
  const DeviceGroup group = host_group(3);
  PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = 12, .costs = equal_costs(kModel.size())});
  const Parameters parameters = initialise(trainer);
  const auto runs = [&](std::size_t device) {
    const auto& order = trainer.plan().order;
    return std::find(order.begin(), order.end(), device) != order.end();
  };
  const auto step = [&] { expect_equals_one_device(trainer, parameters, trainer.step(12, forward, backward).value()); };
  step();
  ASSERT_TRUE(runs(1));
  trainer.retire("host:1");
  for (int k = 0; k < 5; ++k) {
    step();
    EXPECT_FALSE(runs(1));
  }
  trainer.restore("host:1");
  trainer.retire("host:0");
  trainer.retire("host:2");
  step();
  EXPECT_EQ(trainer.plan().order, (std::vector<std::size_t>{1}));
  EXPECT_THROW(trainer.retire("host:1"), InvalidArgument) << "the last one";
  EXPECT_THROW(trainer.retire("host:7"), InvalidArgument);
}

TEST(Pipeline, DividesByTheTotalWeight) {
  const DeviceGroup group = host_group(2);
  PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = 8, .costs = equal_costs(kModel.size())});
  const Parameters parameters = initialise(trainer);
  const double loss = trainer.step(8, forward, backward, 16.0).value();
  const auto reference = kModel.reference(parameters, trainer.plan().sizes);
  EXPECT_EQ(loss, reference.loss / 2.0);
  for (std::size_t b = 0; b < kModel.size(); ++b) {
    for (std::size_t k = 0; k < trainer.gradients(b).size(); ++k) {
      EXPECT_EQ(trainer.gradients(b)[k], reference.gradients[b][k] / 2.0);
    }
  }
}

TEST(Pipeline, ReportsWhatRanAndAnErrorOfAnUpdate) {
  const DeviceGroup group = host_group(2);
  PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = 8, .costs = equal_costs(kModel.size())});
  EXPECT_TRUE(trainer.last_step().actions.empty());
  std::atomic<int> updates{0};
  trainer.update([&](const BasicBlockUpdate<double>&) { ++updates; });
  EXPECT_EQ(updates, 6) << "before the first step, too";
  trainer.step(8, forward, backward);
  const PipelineRecord& record = trainer.last_step();
  EXPECT_EQ(record.actions.size(), record.plan.schedule.stages.size());
  EXPECT_GT(record.step_seconds, 0.0);
  EXPECT_GT(record.plan.seconds, 0.0);
  EXPECT_FALSE(trainer.explain().empty());
  const observe::Metrics metrics = trainer.log().metrics();
  EXPECT_EQ(metrics.steps, 1);
  EXPECT_GT(metrics.devices[record.plan.order[0]].busy_seconds, 0.0);
  EXPECT_EQ(metrics.devices[record.plan.order[0]].items, 8);
  const observe::HistoryRow row = trainer.log().history().snapshot().at(0);
  EXPECT_EQ(row.blocks[0] + row.blocks[1], 6);
  EXPECT_EQ(row.moves, 0);
  std::size_t actions = 0;
  for (const auto& stage : record.actions) actions += stage.size();
  const auto events = trainer.log().events().snapshot();
  EXPECT_EQ(events.size(), actions + 1);
  EXPECT_EQ(events.back().kind, observe::EventKind::step);
  EXPECT_EQ(events.back().end, 8);
  try {
    trainer.update([](const BasicBlockUpdate<double>& one) {
      if (one.block == 5) throw std::out_of_range("no such row");
    });
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.device(), group.devices()[trainer.plan().order.back()].name);
    EXPECT_TRUE(says(error, "block 5"));
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

TEST(Pipeline, RefusesWhatDoesNotFit) {
  const DeviceGroup group = host_group(2);
  const auto refuses = [&](const std::function<void(PipelineOptions&)>& change) {
    PipelineOptions options{.blocks = kModel.blocks(), .batch_size = 8, .costs = equal_costs(kModel.size())};
    change(options);
    EXPECT_THROW(PipelineTrainer(group, options), InvalidArgument);
  };
  refuses([](PipelineOptions& options) { options.blocks.clear(); });
  refuses([](PipelineOptions& options) { options.blocks.back().output_count = 3; });
  refuses([](PipelineOptions& options) { options.batch_size = 0; });
  refuses([](PipelineOptions& options) { options.costs.pop_back(); });
  refuses([](PipelineOptions& options) { options.speeds = {1.0}; });
  refuses([](PipelineOptions& options) { options.speeds = {1.0, 0.0}; });
  refuses([](PipelineOptions& options) { options.memory_limits = {1, 2, 3}; });
  refuses([](PipelineOptions& options) { options.stages.cuts = {0, 9}; });
  PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = 8, .costs = equal_costs(kModel.size())});
  EXPECT_THROW(trainer.step(0, forward, backward), InvalidArgument);
  EXPECT_THROW(trainer.step(8, forward, backward, 0.0), InvalidArgument);
  EXPECT_THROW(trainer.step(8, forward, backward, -1.0), InvalidArgument);
  EXPECT_THROW(static_cast<void>(trainer.parameters(6)), InvalidArgument);
}

}  // namespace
}  // namespace paceline
