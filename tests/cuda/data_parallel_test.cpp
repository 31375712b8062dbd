// SPDX-License-Identifier: Apache-2.0
//
// The training step on GPUs: the gradient of one device, whatever order the fake runs things in.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "gpu_training.hpp"
#include "orders.hpp"
#include "reduce.hpp"
#include "reduction_twin.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

class OnGpus : public ::testing::TestWithParam<Box> {
 protected:
  /// Calls `body` for each order, with options for the box's transport. Nothing may be left of it.
  template <class Body>
  static void for_each_order(const Body& body) {
    paceline::for_each_order(kOrders, [&](std::uint64_t seed) {
      boot(seed, GetParam().gpus);
      body(seed, DataParallelOptions{.parameter_count = kWidth,
                                     .collectives = {.transport = GetParam().transport, .warm_up_bytes = 64}});
      make_whole(GetParam());
    });
  }
};

/// A step as on one device.
void expect_step(Trainer& trainer, Reference& reference) {
  const double expected = reference.step();
  ASSERT_NEAR(trainer.step(kBatch, body).value(), expected, 1e-12 * expected);
}

void expect_parameters(Trainer& trainer, const Reference& reference) {
  const std::vector<double> parameters = fetched(trainer);
  for (std::size_t j = 0; j < kWidth; ++j) ASSERT_NEAR(parameters[j], reference.parameters[j], 1e-12);
}

double fails(const MicroBatch&, Trainer::Replica&) { throw std::runtime_error("no"); }

TEST_P(OnGpus, TrainsAsOneDeviceWhateverTheOrder) {
  for_each_order([](std::uint64_t seed, DataParallelOptions options) {
    int synchronize_calls_of_the_test = 0;
    {
      Reference reference;
      options.balance = seed % 3 == 0 ? Balance::automatic : Balance::even;
      options.micro_batch = static_cast<std::int64_t>(seed % 4);
      options.run_ahead = static_cast<std::int64_t>(seed % 2);
      if (options.balance == Balance::automatic && options.micro_batch == 0) options.corrections = true;
      Trainer trainer(group_of(GetParam()), options);
      for (int step = 0; step < 4; ++step) {
        ASSERT_NO_FATAL_FAILURE(expect_step(trainer, reference)) << "step " << step;
        update(trainer);
        ASSERT_LE(most_in_flight.load(), static_cast<int>(GetParam().devices.size()) * (1 + options.run_ahead));
      }
      ASSERT_EQ(fake::synchronize_calls(), 0);
      ASSERT_NO_FATAL_FAILURE(expect_parameters(trainer, reference));
      synchronize_calls_of_the_test = fake::synchronize_calls();
    }
    make_whole(GetParam());
    ASSERT_EQ(fake::synchronize_calls(), synchronize_calls_of_the_test);
  });
}

TEST_P(OnGpus, AFailedStepLeavesNothingRunningAndTheNextOneIsRight) {
  for_each_order([](std::uint64_t, DataParallelOptions options) {
    Reference reference;
    options.balance = Balance::even;
    options.micro_batch = 2;
    Trainer trainer(group_of(GetParam()), options);
    const auto fails_last = [](const MicroBatch& mb, Trainer::Replica& replica) {
      const double loss = body(mb, replica);
      if (mb.end == kBatch) throw std::runtime_error("no");
      return loss;
    };
    EXPECT_THROW(trainer.step(kBatch, fails_last), Error);
    ASSERT_EQ(fake::leftovers().queued, 0U) << "the user may take back what the step has used";
    ASSERT_NO_FATAL_FAILURE(expect_step(trainer, reference));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, OnGpus,
    ::testing::Values(Box{"OneGpu", 1, {"cuda:0"}}, Box{"TwoPartitions", 1, {"cuda:0/0", "cuda:0/1"}},
                      Box{"TwoGpus", 2, {"cuda:0", "cuda:1"}}, Box{"GpuAndHost", 1, {"cuda:0", "host:0", "host:1"}},
                      Box{"FourGpus", 4, {"cuda:0", "cuda:3", "cuda:2", "cuda:1"}},
                      Box{"Everything", 2, {"host:0", "cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1"}},
                      Box{"TwoGpusByCopies", 2, {"cuda:0", "cuda:1"}, {}, Transport::copies},
                      Box{"TwoGpusThroughTheHost", 3, {"cuda:0", "cuda:2"}, {}, Transport::copies},
                      Box{"EverythingByCopies",
                          2,
                          {"host:0", "cuda:0/0", "cuda:0/1", "cuda:1/0", "cuda:1/1"},
                          {},
                          Transport::copies}),
    [](const auto& param) { return param.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Parts, OnGpus,
    ::testing::Values(Box{"TwoEqual", 1, {"cuda:0/0", "cuda:0/1"}, {0.5, 0.5}},
                      Box{"TwoUnequal", 1, {"cuda:0/0", "cuda:0/1"}, {0.75, 0.25}},
                      Box{"Four", 1, {"cuda:0/0", "cuda:0/1", "cuda:0/2", "cuda:0/3"}, {0.4, 0.3, 0.2, 0.1}},
                      Box{"PartsAndHost", 1, {"cuda:0/1", "host:0", "cuda:0/0"}, {0.6, 0.4}},
                      Box{"PartsOfTwoGpus", 2, {"cuda:0/1", "cuda:1/0", "host:0", "cuda:1/1"}, {0.5, 0.25}},
                      Box{"TwoAsGpus", 1, {"cuda:0/1", "cuda:0/0"}, {0.5, 0.5}, Transport::copies, true},
                      Box{"FourAsGpus",
                          1,
                          {"cuda:0/0", "cuda:0/1", "cuda:0/2", "cuda:0/3"},
                          {0.4, 0.3, 0.2, 0.1},
                          Transport::copies,
                          true},
                      Box{"AsGpusAndHostThroughTheHost",
                          1,
                          {"host:0", "cuda:0/0", "cuda:0/1", "cuda:0/2"},
                          {0.5, 0.25, 0.25},
                          Transport::copies,
                          true,
                          true}),
    [](const auto& param) { return param.param.name; });

/// body() for items with costs, which do not follow each other.
double body_by_item(const MicroBatch& mb, Trainer::Replica& replica) {
  double loss = 0.0;
  for (const std::int64_t item : mb.items) {
    MicroBatch one = mb;
    one.begin = item;
    one.end = item + 1;
    loss += body(one, replica);
  }
  return loss;
}

TEST(CudaDataParallel, StepsWithAndWithoutCostsMayBePendingAtOnce) {
  std::vector<double> costs;
  for (std::int64_t k = 0; k < kBatch; ++k) costs.push_back(1.0 + static_cast<double>(k % 5));
  for (const Box& box : {Box{"", 1, {"cuda:0"}}, Box{"", 2, {"cuda:0", "cuda:1", "host:0"}}}) {
    for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
      boot(seed, box.gpus);
      Reference reference;
      Trainer trainer(group_of(box),
                      {.parameter_count = kWidth, .collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
      std::vector<double> expected;
      std::vector<Objective> objectives;
      for (int step = 0; step < 6; ++step) {
        expected.push_back(reference.step());
        objectives.push_back(step % 2 == 0 ? trainer.step(kBatch, body) : trainer.step(costs, body_by_item));
        update(trainer);
      }
      for (std::size_t k = 0; k < expected.size(); ++k) {
        ASSERT_NEAR(objectives[k].value(), expected[k], 1e-12 * expected[k]) << "seed " << seed << ", step " << k;
      }
    }
  }
}

TEST(CudaDataParallel, AddsWhatABodyReturnsToWhatItAddsUpOnTheDevice) {
  for (const Box& box : {Box{"", 1, {"cuda:0"}}, Box{"", 2, {"cuda:0", "cuda:1", "host:0"}}}) {
    boot(1, box.gpus);
    Reference reference;
    Trainer trainer(group_of(box),
                    {.parameter_count = kWidth, .collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
    const double expected = reference.step() + 3.0;
    const Objective objective = trainer.step(kBatch, [](const MicroBatch& mb, Trainer::Replica& replica) {
      return body(mb, replica) + 3.0 * static_cast<double>(mb.size());
    });
    EXPECT_NEAR(objective.value(), expected, 1e-12 * expected);
  }
}

TEST(CudaDataParallel, AStepThatFailsLeavesTheObjectivesBeforeIt) {
  boot(1, 1);
  Reference reference;
  Trainer trainer(group_of({"", 1, {"cuda:0/0", "cuda:0/1"}}), {.parameter_count = kWidth});
  const double expected = reference.step();
  const Objective before = trainer.step(kBatch, body);
  update(trainer);
  EXPECT_THROW(trainer.step(kBatch, fails), Error);
  EXPECT_NEAR(before.value(), expected, 1e-12 * expected);
  expect_step(trainer, reference);
}

TEST(CudaDataParallel, AnObjectiveMayBeReadLaterAndOutlivesItsTrainer) {
  boot(1, 1);
  std::vector<Objective> objectives;
  std::vector<double> expected;
  const std::span<double> kept = [&] {
    Reference reference;
    Trainer trainer(group_of({"", 1, {"cuda:0/0", "cuda:0/1"}}), {.parameter_count = kWidth});
    const std::span<double> gradients = trainer.gradients();
    for (int step = 0; step < 6; ++step) {
      expected.push_back(reference.step());
      objectives.push_back(trainer.step(kBatch, body));
      EXPECT_EQ(trainer.gradients().data(), gradients.data()) << "a span that was kept is that of each step";
      update(trainer);
    }
    return gradients;
  }();
  for (std::size_t k = 0; k < expected.size(); ++k)
    EXPECT_NEAR(objectives[k].value(), expected[k], 1e-12 * expected[k]);
  EXPECT_EQ(kept.size(), kWidth);
}

TEST(CudaDataParallel, LearnsSpeedsFromTheDevicesClocks) {
  boot(1, 2);
  Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}), {.parameter_count = kWidth});
  for (int step = 0; step < 30; ++step) {
    trainer.step(96, body);
    update(trainer);
  }
  EXPECT_NEAR(static_cast<double>(trainer.shares()[0]), 64.0, 6.0);  // twice as fast
}

TEST(CudaDataParallel, TakesTheCallersStream) {
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot(seed, 1);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    {
      Trainer trainer(group_of({"", 1, {"cuda:0/0", "cuda:0/1"}}), {.parameter_count = kWidth, .stream = stream});
      EXPECT_EQ(trainer.stream(), stream);
      Reference reference;
      for (int step = 0; step < 3; ++step) {
        ASSERT_NO_FATAL_FAILURE(expect_step(trainer, reference));
        update(trainer);
      }
      fetched(trainer);
    }
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  });
}

/// Counts the kernels that reduce.
struct Reductions {
  int launches = 0;

  Reductions() {
    fake::twin(&cuda::paceline_reduce_float64, [this](const fake::Launch&, const cuda::ReductionArguments& arguments) {
      ++launches;
      for (int k = 0; k < arguments.input_count; ++k) {
        fake::reads(arguments.inputs[k], arguments.count * sizeof(double));
      }
      fake::writes(arguments.output, arguments.count * sizeof(double));
      cuda::reduction_twin(arguments, DType::float64);
    });
  }
};

TEST(CudaDataParallel, ReducesNoMoreThanItMust) {
  struct Case {
    Box box;
    double weight;
  };
  const Box whole{"", 1, {"cuda:0"}};
  const Box part{"", 1, {"cuda:0/1"}, {0.5, 0.5}};
  const Box parts{"", 1, {"cuda:0/0", "cuda:0/1"}, {0.5, 0.5}};
  // The gradients and the loss are each summed and divided at once.
  for (const Case& wanted : {Case{whole, 1.0}, Case{part, 1.0}, Case{whole, 8.0}, Case{part, 8.0}, Case{parts, 8.0}}) {
    for (std::uint64_t seed = 0; seed < kOrders / 4; ++seed) {
      boot(seed, 1);
      const Reductions reductions;
      {
        Trainer trainer(group_of(wanted.box), {.parameter_count = kWidth, .balance = Balance::even, .micro_batch = 6});
        std::vector<double> parameters(kWidth, 0.0);
        for (int step = 0; step < 3; ++step) {
          std::vector<double> gradients(kWidth, 0.0);
          const double loss = add_gradients(0, kBatch, parameters.data(), gradients.data()) / wanted.weight;
          ASSERT_NEAR(trainer.step(kBatch, body, wanted.weight).value(), loss, 1e-12 * loss) << "seed " << seed;
          for (std::size_t j = 0; j < kWidth; ++j) parameters[j] -= 0.5 * gradients[j] / wanted.weight;
          update(trainer);
        }
        const std::vector<double> trained = fetched(trainer);
        for (std::size_t j = 0; j < kWidth; ++j) {
          ASSERT_NEAR(trained[j], parameters[j], 1e-12 * (1.0 + std::abs(parameters[j]))) << "seed " << seed;
        }
      }
      ASSERT_EQ(reductions.launches, 3 * 2) << "seed " << seed;
      make_whole(wanted.box);
      ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
    }
  }
}

TEST(CudaDataParallel, AFailedStepAlsoEndsWhatItBeganForDevicesWithoutWork) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}),
                    {.parameter_count = kWidth,
                     .balance = Balance::weighted,
                     .weights = {1.0, 0.0},
                     .collectives = {.transport = Transport::nccl, .warm_up_bytes = 64}});
    EXPECT_THROW(trainer.step(kBatch, fails), Error);
    ASSERT_EQ(fake::leftovers().queued, 0U) << "seed " << seed;
  }
}

TEST(CudaDataParallel, AStepThatCannotStartLeavesNothingEnqueued) {
  for (std::uint64_t seed = 0; seed < kOrders; ++seed) {
    boot(seed, 2);
    DeviceGroup group = group_of({"", 2, {"cuda:0", "cuda:1"}});
    Trainer trainer(group, {.parameter_count = kWidth, .collectives = {.transport = Transport::copies}});
    trainer.step(kBatch, body);
    update(trainer);
    group.close();  // found out only when the parameters are on their way, as with another trainer that comes first
    EXPECT_THROW(trainer.step(kBatch, body), Unavailable);
    ASSERT_EQ(fake::leftovers().queued, 0U) << "seed " << seed;
  }
}

TEST(CudaDataParallel, GoesWithoutHoldingTheThreadInTheMiddleOfWork) {
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot(seed, 1);
    {
      Trainer trainer(group_of({"", 1, {"cuda:0"}}), {.parameter_count = kWidth});
      trainer.step(kBatch, body);
      for (int k = 0; k < 20; ++k) update(trainer);
    }
    ASSERT_EQ(fake::synchronize_calls(), 0) << "pinned memory was given back while work ran";
  });
}

TEST(CudaDataParallel, LeavesTheUpdateToTheCallersStream) {
  boot(1, 2);
  Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}), {.parameter_count = 100000});
  int calls = 0;
  trainer.update([&](std::size_t begin, std::size_t end) {
    ++calls;
    EXPECT_EQ(begin, 0U);
    EXPECT_EQ(end, 100000U);
  });
  EXPECT_EQ(calls, 1);
}

TEST(CudaDataParallel, ByCopiesARetiredGpuIsLeftAloneUntilItIsRestored) {
  for_each_order(kOrders, [](std::uint64_t seed) {
    boot(seed, 2);
    Reference reference;
    Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}),
                    {.parameter_count = kWidth, .collectives = {.transport = Transport::copies}});
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        ASSERT_NO_FATAL_FAILURE(expect_step(trainer, reference)) << "step " << step;
        update(trainer);
      }
    };
    train(2);
    trainer.retire("cuda:1");
    train(2);
    fake::poison(1, cudaErrorIllegalAddress);
    train(3);
    fake::poison(1, cudaSuccess);
    trainer.restore("cuda:1");
    train(3);
    ASSERT_GT(trainer.shares()[1], 0);
    ASSERT_NO_FATAL_FAILURE(expect_parameters(trainer, reference));
  });
}

TEST(CudaDataParallel, NamesTheDeviceThatBroke) {
  boot(2, 2);
  Trainer trainer(group_of({"", 2, {"cuda:0", "cuda:1"}}), {.parameter_count = kWidth});
  trainer.step(kBatch, body);
  fake::poison(1, cudaErrorIllegalAddress);
  const auto error =
      thrown_by<Error>([&] { trainer.step(kBatch, [](const MicroBatch&, Trainer::Replica&) { return 0.0; }); });
  EXPECT_EQ(error.device(), "cuda:1") << error.what();
}

}  // namespace
}  // namespace paceline
