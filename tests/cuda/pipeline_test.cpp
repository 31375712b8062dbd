// SPDX-License-Identifier: Apache-2.0
//
// Pipelines on GPUs: the gradient of one device, whatever order the fake runs things in, with sends between memory
// spaces.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/engine/pipeline.hpp>
#include <paceline/error.hpp>

#include "block_model.hpp"
#include "errors.hpp"
#include "fake_cuda.hpp"
#include "gpu_training.hpp"
#include "orders.hpp"

namespace paceline {
namespace {

using PipelineTrainer = BasicPipeline<double>;
using Piece = BasicBlockRun<double>;
using PieceUpdate = BasicBlockUpdate<double>;

constexpr std::int64_t kItems = 11;
const BlockModel kModel({3, 5, 4, 6, 2, 3, 4});  // six blocks

// Kernels of the user: their addresses are all that a launch needs here.
inline void forward_kernel(Piece, double) {}
inline void backward_kernel(Piece, double) {}
inline void descend_kernel(PieceUpdate) {}
inline void initialise_kernel(PieceUpdate) {}
inline void fetch_kernel(const double*, double*, std::size_t) {}

template <class Kernel, class... Arguments>
void launch(Kernel* kernel, int device, NativeStream stream, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(1), dim3(1), pointers, 0, stream),
            cudaSuccess);
}

void set_up(std::uint64_t seed, int gpus) {
  boot(seed, gpus);
  fake::twin(&forward_kernel, [](const fake::Launch&, const Piece& run, double seconds) {
    fake::reads(run.parameters.data(), run.parameters.size_bytes());
    fake::reads(run.input.data(), run.input.size_bytes());
    fake::writes(run.output.data(), run.output.size_bytes());
    fake::writes(run.saved.data(), run.saved.size_bytes());
    fake::writes(run.loss_sum, sizeof(double));
    fake::takes(seconds);
    *run.loss_sum += kModel.forward(run);
  });
  fake::twin(&backward_kernel, [](const fake::Launch&, const Piece& run, double seconds) {
    fake::reads(run.parameters.data(), run.parameters.size_bytes());
    fake::reads(run.input.data(), run.input.size_bytes());
    fake::reads(run.saved.data(), run.saved.size_bytes());
    fake::reads(run.output_gradient.data(), run.output_gradient.size_bytes());
    fake::writes(run.input_gradient.data(), run.input_gradient.size_bytes());
    fake::writes(run.gradients.data(), run.gradients.size_bytes());
    fake::takes(seconds);
    kModel.backward(run);
  });
  fake::twin(&descend_kernel, [](const fake::Launch&, const PieceUpdate& one) {
    fake::reads(one.gradients.data(), one.gradients.size_bytes());
    fake::writes(one.parameters.data(), one.parameters.size_bytes());
    for (std::size_t k = 0; k < one.parameters.size(); ++k) one.parameters[k] -= 0.1 * one.gradients[k];
  });
  fake::twin(&initialise_kernel, [](const fake::Launch&, const PieceUpdate& one) {
    fake::writes(one.parameters.data(), one.parameters.size_bytes());
    kModel.initialise(one.block, one.parameters);
  });
  fake::twin(&fetch_kernel, [](const fake::Launch&, const double* from, double* to, std::size_t count) {
    fake::reads(from, count * sizeof(double));
    for (std::size_t k = 0; k < count; ++k) to[k] = from[k];
  });
}

/// Bodies for GPUs and host devices. A device takes a millisecond per item and block over its speed.
struct Bodies {
  const DeviceGroup& group;
  std::vector<double> speeds{};

  [[nodiscard]] int gpu(DeviceId device) const { return group.device(device).index; }
  [[nodiscard]] double seconds(const Piece& run) const {
    return 1e-3 * static_cast<double>(run.size()) / (speeds.empty() ? 1.0 : speeds[run.device.number()]);
  }
  double operator()(const Piece& run) const {
    if (run.stream == nullptr) return kModel.forward(run);
    launch(&forward_kernel, gpu(run.device), run.stream, run, seconds(run));
    return 0.0;
  }
  void back(const Piece& run) const {
    if (run.stream == nullptr) return kModel.backward(run);
    launch(&backward_kernel, gpu(run.device), run.stream, run, 2.0 * seconds(run));
  }
};

using Parameters = std::vector<std::vector<double>>;

Parameters initialise(PipelineTrainer& trainer) {
  trainer.update([&](const PieceUpdate& one) {
    if (one.stream == nullptr) return kModel.initialise(one.block, one.parameters);
    launch(&initialise_kernel, trainer.group().device(one.device).index, one.stream, one);
  });
  Parameters all;
  for (std::size_t b = 0; b < kModel.size(); ++b) {
    all.emplace_back(kModel.parameters(b));
    kModel.initialise(b, all.back());
  }
  return all;
}

void descend(PipelineTrainer& trainer) {
  trainer.update([&](const PieceUpdate& one) {
    if (one.stream != nullptr) {
      return launch(&descend_kernel, trainer.group().device(one.device).index, one.stream, one);
    }
    for (std::size_t k = 0; k < one.parameters.size(); ++k) one.parameters[k] -= 0.1 * one.gradients[k];
  });
}

void descend(Parameters& parameters, const BlockModel::Reference& reference) {
  for (std::size_t b = 0; b < kModel.size(); ++b) {
    for (std::size_t k = 0; k < parameters[b].size(); ++k) parameters[b][k] -= 0.1 * reference.gradients[b][k];
  }
}

std::vector<double> fetched(PipelineTrainer& trainer, std::size_t block) {
  std::vector<double> values(kModel.parameters(block));
  trainer.update([&](const PieceUpdate& one) {
    if (one.block != block) return;
    if (one.stream == nullptr) {
      values.assign(one.gradients.begin(), one.gradients.end());
      return;
    }
    launch(&fetch_kernel, trainer.group().device(one.device).index, one.stream, one.gradients.data(), values.data(),
           values.size());
  });
  if (const auto stream = trainer.stream(block)) {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    }
  }
  return values;
}

/// Checks a step that has run against one device, and goes down the gradient on both.
void expect_as_one_device(PipelineTrainer& trainer, Parameters& parameters, const Objective& loss) {
  const BlockModel::Reference reference = kModel.reference(parameters, trainer.plan().sizes);
  ASSERT_EQ(loss.value(), reference.loss);
  for (std::size_t b = 0; b < kModel.size(); ++b) ASSERT_EQ(fetched(trainer, b), reference.gradients[b]) << b;
  descend(trainer);
  descend(parameters, reference);
}

PipelineOptions options_of(std::uint64_t seed, std::size_t devices) {
  PipelineOptions options{.blocks = kModel.blocks(), .batch_size = kItems};
  options.costs.assign(kModel.size(), {.forward_per_item = 1e-3, .backward_per_item = 2e-3});
  options.stages.micro_batches = static_cast<std::int64_t>(1 + seed % 6);
  for (std::size_t d = 0; d < devices; ++d) {
    options.stages.order.push_back((d + seed) % devices);
    options.stages.cuts.push_back(d);
  }
  return options;
}

Objective step(PipelineTrainer& trainer, const Bodies& bodies, std::int64_t items = kItems) {
  return trainer.step(items, bodies, [&](const Piece& run) { bodies.back(run); });
}

class PipelineOnGpus : public ::testing::TestWithParam<Box> {
 protected:
  /// Calls `body` for each seed, with the box's devices. Nothing may be left of it.
  template <class Body>
  static void for_each_order(std::uint64_t count, const Body& body) {
    paceline::for_each_order(count, [&](std::uint64_t seed) {
      set_up(seed, GetParam().gpus);
      {
        const DeviceGroup group = group_of(GetParam());
        body(seed, group, Bodies{group});
      }
      make_whole(GetParam());
    });
  }
};

TEST_P(PipelineOnGpus, TrainsAsOneDeviceWhateverTheOrder) {
  for_each_order(kOrders / 10, [](std::uint64_t seed, const DeviceGroup& group, const Bodies& bodies) {
    PipelineTrainer trainer(group, options_of(seed, group.size()));
    Parameters parameters = initialise(trainer);
    for (int k = 0; k < 3; ++k) {
      ASSERT_NO_FATAL_FAILURE(expect_as_one_device(trainer, parameters, step(trainer, bodies))) << "step " << k;
    }
  });
}

TEST_P(PipelineOnGpus, StepsMayBePendingAndNothingWaitsForTheGpus) {
  for_each_order(kOrders / 10, [](std::uint64_t seed, const DeviceGroup& group, const Bodies& bodies) {
    PipelineTrainer trainer(group, options_of(seed, group.size()));
    Parameters parameters = initialise(trainer);
    std::vector<Objective> losses;
    std::vector<double> expected;
    for (int k = 0; k < 5; ++k) {
      losses.push_back(step(trainer, bodies, k % 2 == 0 ? kItems - 3 : kItems));
      descend(trainer);
      const auto reference = kModel.reference(parameters, trainer.plan().sizes);
      expected.push_back(reference.loss);
      descend(parameters, reference);
    }
    ASSERT_EQ(fake::synchronize_calls(), 0);
    for (std::size_t k = 0; k < losses.size(); ++k) ASSERT_EQ(losses[k].value(), expected[k]) << "step " << k;
  });
}

TEST_P(PipelineOnGpus, AFailedStepLeavesNothingRunningAndTheNextOneIsRight) {
  for_each_order(kOrders / 10, [](std::uint64_t seed, const DeviceGroup& group, const Bodies& bodies) {
    PipelineTrainer trainer(group, options_of(3, group.size()));
    Parameters parameters = initialise(trainer);
    const auto fails = [&](const Piece& run) {
      bodies.back(run);
      if (run.block == seed % 6 && run.micro_batch == 2) throw std::runtime_error("no");
    };
    EXPECT_THROW(trainer.step(kItems, bodies, fails), Error);
    ASSERT_EQ(fake::leftovers().queued, 0U) << "the user may take back what the step has used";
    ASSERT_NO_FATAL_FAILURE(expect_as_one_device(trainer, parameters, step(trainer, bodies)));
  });
}

TEST_P(PipelineOnGpus, AStepWhoseGradientsCannotBeSummedLeavesNothingRunning) {
  set_up(0, GetParam().gpus);
  {
    DeviceGroup group = group_of(GetParam());
    const Bodies bodies{group};
    PipelineTrainer trainer(group, options_of(3, group.size()));
    initialise(trainer);
    const auto back = [&](const Piece& run) {
      bodies.back(run);
      try {
        // The step comes to its end all the same. The sums are a task of their own, and that is refused.
        if (run.block == 0) group.close(std::chrono::nanoseconds(0));
      } catch (const Timeout&) {
      }
    };
    EXPECT_THROW(trainer.step(kItems, bodies, back), Unavailable);
    ASSERT_EQ(fake::leftovers().queued, 0U) << "the user may take back what the step has used";
  }
  DeviceGroup::close_all();  // waits for the workers that close() has left behind
  make_whole(GetParam());
}

TEST_P(PipelineOnGpus, BlocksAreMeasuredAndMoveBetweenMemorySpaces) {
  for_each_order(kOrders / 40, [](std::uint64_t, const DeviceGroup& group, const Bodies& bodies) {
    PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = kItems});
    Parameters parameters = initialise(trainer);
    for (int k = 0; trainer.measuring() || k < 4; ++k) {
      ASSERT_NO_FATAL_FAILURE(expect_as_one_device(trainer, parameters, step(trainer, bodies))) << "step " << k;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, PipelineOnGpus,
    ::testing::Values(
        Box{"OneGpu", 1, {"cuda:0"}}, Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}},
        Box{"Parts", 1, {"cuda:0/0", "cuda:0/1", "cuda:0/2"}, {0.5, 0.3, 0.2}},
        Box{"PartsAsGpus", 1, {"cuda:0/0", "cuda:0/1", "cuda:0/2"}, {0.5, 0.3, 0.2}, Transport::copies, true},
        Box{"GpuAndHost", 1, {"host:0", "cuda:0", "host:1"}},
        Box{"FourGpus", 4, {"cuda:0", "cuda:3", "cuda:2", "cuda:1"}},
        Box{"Everything", 2, {"cuda:0/0", "cuda:1/0", "host:0", "cuda:0/1", "cuda:1/1"}, {0.5, 0.5}}),
    [](const auto& param) { return param.param.name; });

class CudaPipeline : public ::testing::Test {
 protected:
  const DeviceGroup group = [] {
    set_up(2, 2);
    return group_of({"", 2, {"cuda:0", "cuda:1"}});
  }();
  Bodies bodies{group};
};

TEST_F(CudaPipeline, AHangThatTheReaderOfTheLossFindsEndsTheTraining) {
  PipelineOptions options = options_of(0, 2);
  options.timeout = std::chrono::milliseconds(20);
  PipelineTrainer trainer(group, options);
  initialise(trainer);
  const Objective loss = trainer.step(kItems, bodies, [&](const Piece& run) {
    bodies.back(run);
    if (run.block == 0 && run.end == kItems) fake::hang(run.stream);  // the last one
  });
  EXPECT_THROW(static_cast<void>(loss.value()), Timeout);
  const auto error = thrown_by<DeviceLost>([&] { static_cast<void>(step(trainer, bodies)); });
  EXPECT_TRUE(says(error, "new process"));
}

TEST_F(CudaPipeline, LearnsSpeedsFromTheDevicesClocks) {
  bodies.speeds = {1.0, 0.2};
  PipelineTrainer trainer(group, {.blocks = kModel.blocks(), .batch_size = 24});
  initialise(trainer);
  for (int k = 0; k < 12; ++k) step(trainer, bodies, 24);
  ASSERT_FALSE(trainer.measuring());
  const plan::StagePlan& plan = trainer.plan();
  std::vector<std::size_t> blocks(2, 0);
  for (std::size_t s = 0; s < plan.order.size(); ++s) {
    blocks[plan.order[s]] = (s + 1 < plan.cuts.size() ? plan.cuts[s + 1] : 6) - plan.cuts[s];
  }
  EXPECT_EQ(blocks, (std::vector<std::size_t>{5, 1})) << trainer.explain();
  const PipelineRecord& record = trainer.last_step();
  EXPECT_NEAR(record.step_seconds, record.plan.seconds, 0.2 * record.plan.seconds) << "by the fake's clock";
}

TEST_F(CudaPipeline, NamesTheDeviceThatBroke) {
  PipelineTrainer trainer(group, options_of(0, 2));
  initialise(trainer);
  static_cast<void>(step(trainer, bodies).value());
  fake::poison(1, cudaErrorIllegalAddress);
  const auto error =
      thrown_by<Error>([&] { trainer.step(kItems, [](const Piece&) { return 0.0; }, [](const Piece&) {}); });
  EXPECT_EQ(error.device(), "cuda:1") << error.what();
}

TEST_F(CudaPipeline, KeepsAllGradientsIfADeviceHasFailedBeforeTheyAreWritten) {
  PipelineTrainer trainer(group, options_of(0, 2));
  initialise(trainer);
  static_cast<void>(step(trainer, bodies).value());
  const std::vector<double> before = fetched(trainer, 0);
  const auto back = [&](const Piece& run) {
    bodies.back(run);
    if (run.block == 0 && run.end == kItems) fake::poison(1, cudaErrorIllegalAddress);  // the last one of the step
  };
  EXPECT_THROW(trainer.step(kItems, [&](const Piece& run) { return bodies(run); }, back, 1.0), Error);
  fake::poison(1, cudaSuccess);
  EXPECT_EQ(fetched(trainer, 0), before);
}

TEST_F(CudaPipeline, ReportsADeviceThatFailedAfterItsStepOnlyOnce) {
  PipelineOptions options{.blocks = kModel.blocks(), .batch_size = kItems};
  options.costs.assign(kModel.size(), {.forward_per_item = 1e-3, .backward_per_item = 2e-3});
  PipelineTrainer trainer(group, options);
  initialise(trainer);
  static_cast<void>(step(trainer, bodies).value());
  fake::poison(1, cudaErrorIllegalAddress);
  EXPECT_THROW(step(trainer, bodies), Error);
  trainer.retire("cuda:1");
  static_cast<void>(step(trainer, bodies).value());
  EXPECT_EQ(trainer.plan().order, std::vector<std::size_t>{0});
}

TEST(CudaPipelineWithoutMemory, SaysSo) {
  fake::boot({.memory_bytes = 4096});
  fake::set_twins();
  const std::vector<PipelineBlock> blocks{{.parameter_count = 1000}};
  EXPECT_THROW(PipelineTrainer(group_of({"", 1, {"cuda:0"}}), {.blocks = blocks}), OutOfMemory);
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

}  // namespace
}  // namespace paceline
