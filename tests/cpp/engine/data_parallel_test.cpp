// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/error.hpp>

#include "errors.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

/// Weighted least squares: l_k = (x_k . p - y_k)^2 / 2.
struct Regression {
  Regression(std::size_t item_count, std::size_t width, std::uint64_t seed)
      : parameter_count(width), rows(item_count, std::vector<double>(width)), targets(item_count), weights(item_count) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<double> normal;
    for (auto& row : rows) {
      for (double& value : row) value = normal(rng);
    }
    for (double& target : targets) target = normal(rng);
    for (double& weight : weights) weight = static_cast<double>(rng() % 5);
  }

  double add(std::int64_t begin, std::int64_t end, std::span<const double> p, std::span<double> gradient) const {
    double sum = 0.0;
    for (auto k = static_cast<std::size_t>(begin); k < static_cast<std::size_t>(end); ++k) {
      double error = -targets[k];
      for (std::size_t j = 0; j < p.size(); ++j) error += rows[k][j] * p[j];
      sum += weights[k] * error * error / 2;
      for (std::size_t j = 0; j < p.size(); ++j) gradient[j] += weights[k] * error * rows[k][j];
    }
    return sum;
  }

  std::size_t parameter_count;
  std::vector<std::vector<double>> rows;
  std::vector<double> targets;
  std::vector<double> weights;
};

using Trainer = BasicDataParallel<double>;

TEST(DataParallel, GivesTheGradientOfOneDeviceForAnySplit) {
  std::mt19937_64 rng(1);
  for (const std::size_t devices : {1U, 2U, 3U}) {
    for (const Balance balance : {Balance::automatic, Balance::even, Balance::weighted}) {
      for (const std::int64_t micro_batch : {0, 5}) {
        const Regression data(64, 9, rng());
        DataParallelOptions options{.parameter_count = 9, .balance = balance, .micro_batch = micro_batch};
        if (options.balance == Balance::weighted) {
          options.weights.assign(devices, 1.0);
          options.weights[0] = 3.5;
        }
        Trainer trainer(host_group(devices), options);
        for (double& p : trainer.parameters()) p = static_cast<double>(rng() % 100) / 50.0 - 1.0;
        for (const std::int64_t batch : {64, 1, 2, 37}) {
          double total = 0.0;
          for (std::int64_t k = 0; k < batch; ++k) total += data.weights[static_cast<std::size_t>(k)];
          if (total == 0.0) continue;
          const Objective loss = trainer.step(
              batch,
              [&](const MicroBatch& mb, Trainer::Replica& replica) {
                return data.add(mb.begin, mb.end, replica.parameters, replica.gradients);
              },
              total);
          std::vector<double> expected(9, 0.0);
          const double sum = data.add(0, batch, trainer.parameters(), expected);
          EXPECT_NEAR(loss.value(), sum / total, 1e-12 * std::abs(sum / total));
          for (std::size_t j = 0; j < 9; ++j)
            EXPECT_NEAR(trainer.gradients()[j], expected[j] / total, 1e-12 * (1 + std::abs(expected[j])));
          std::int64_t ran = 0;
          for (const std::int64_t share : trainer.shares()) ran += share;
          EXPECT_EQ(ran, batch);
        }
      }
    }
  }
}

TEST(DataParallel, LeavesTheGradientsAloneWhenABodyThrows) {
  Trainer trainer(host_group(2), {.parameter_count = 4});
  trainer.step(8, [](const MicroBatch& mb, Trainer::Replica& replica) {
    for (double& g : replica.gradients) g += static_cast<double>(mb.size());
    return 0.0;
  });
  const std::vector<double> before(trainer.gradients().begin(), trainer.gradients().end());
  EXPECT_EQ(before, std::vector<double>(4, 1.0));
  EXPECT_THROW(trainer.step(8,
                            [](const MicroBatch& mb, Trainer::Replica& replica) -> double {
                              for (double& g : replica.gradients) g += 100.0;
                              if (mb.begin == 0) throw std::runtime_error("no");
                              return 0.0;
                            }),
               Error);
  EXPECT_EQ(before, std::vector<double>(trainer.gradients().begin(), trainer.gradients().end()));
  EXPECT_NO_THROW(trainer.step(8, [](const MicroBatch&, Trainer::Replica&) { return 0.0; }));
}

TEST(DataParallel, KeepsItsGradientsWhereTheyAre) {
  Trainer trainer(host_group(2), {.parameter_count = 4});
  const std::span<double> kept = trainer.gradients();
  for (int step = 1; step <= 3; ++step) {
    trainer.step(8, [&](const MicroBatch& mb, Trainer::Replica& replica) {
      for (double& g : replica.gradients) g += static_cast<double>(step * mb.size());
      return 0.0;
    });
    for (const double value : kept) EXPECT_EQ(value, static_cast<double>(step)) << "a span of an earlier step";
  }
}

TEST(DataParallel, DoesWithoutADeviceThatIsRetired) {
  const Regression data(64, 9, 3);
  Trainer trainer(host_group(2), {.parameter_count = 9, .balance = Balance::even});
  const auto step = [&] {
    double total = 0.0;
    for (const double weight : data.weights) total += weight;
    trainer.step(
        64,
        [&](const MicroBatch& mb, Trainer::Replica& replica) {
          return data.add(mb.begin, mb.end, replica.parameters, replica.gradients);
        },
        total);
    std::vector<double> expected(9, 0.0);
    data.add(0, 64, trainer.parameters(), expected);
    for (std::size_t j = 0; j < 9; ++j) EXPECT_NEAR(trainer.gradients()[j], expected[j] / total, 1e-12);
  };
  step();
  trainer.retire("host:1");
  for (int k = 0; k < 5; ++k) {
    step();
    EXPECT_EQ(trainer.shares(), (std::vector<std::int64_t>{64, 0}));
  }
  EXPECT_THROW(trainer.retire("host:0"), InvalidArgument) << "nobody would be left";
  EXPECT_THROW(trainer.retire("host:7"), InvalidArgument);
  trainer.restore("host:1");
  step();
  EXPECT_EQ(trainer.shares(), (std::vector<std::int64_t>{32, 32}));
}

TEST(DataParallel, BeginsWithTheSpeedsOfAnEarlierRun) {
  const auto body = [](const MicroBatch& mb, Trainer::Replica& replica) {
    for (double& g : replica.gradients) g += static_cast<double>(mb.size());
    return 0.0;
  };
  Trainer trainer(host_group(2), {.parameter_count = 1, .corrections = false});
  EXPECT_FALSE(trainer.speeds()[0]);
  trainer.hint({plan::CostModel::affine(0.0, 0.003), plan::CostModel::affine(0.0, 0.001)});
  trainer.step(64, body);
  EXPECT_EQ(trainer.shares(), (std::vector<std::int64_t>{16, 48}));
  EXPECT_EQ(trainer.gradients()[0], 1.0);
  trainer.step(64, body);  // the first run of a size is no evidence
  EXPECT_TRUE(trainer.speeds()[0]);
}

TEST(DataParallel, RefusesWhatCannotBeTrained) {
  EXPECT_THROW(Trainer(host_group(2), {.parameter_count = 0}), InvalidArgument);
  EXPECT_THROW((void)balance_named("fair"), InvalidArgument);
  EXPECT_EQ(balance_named(name_of(Balance::weighted)), Balance::weighted);
  EXPECT_THROW(Trainer(host_group(2), {.parameter_count = 1, .balance = Balance::weighted, .weights = {1.0}}),
               InvalidArgument);
  Trainer trainer(host_group(2), {.parameter_count = 1});
  const auto body = [](const MicroBatch&, Trainer::Replica&) { return 0.0; };
  EXPECT_THROW(trainer.step(0, body), InvalidArgument);
  EXPECT_THROW(trainer.step(4, body, -1.0), InvalidArgument);
  EXPECT_THROW(trainer.step(4, body, 0.0), InvalidArgument);
  EXPECT_THROW(trainer.step(4, body, std::nan("")), InvalidArgument);
}

TEST(DataParallel, SaysThatThereIsNoMemory) {
  EXPECT_THROW(Trainer(host_group(2), {.parameter_count = std::size_t{1} << 62}), OutOfMemory);
}

TEST(DataParallel, RefusesASecondStepAndDoesTheFirst) {
  Trainer trainer(host_group(2), {.parameter_count = 1});
  std::atomic<bool> inside{false};
  std::atomic<bool> go{false};
  std::thread first([&] {
    trainer.step(8, [&](const MicroBatch& mb, Trainer::Replica& replica) {
      inside = true;
      while (!go) std::this_thread::yield();
      replica.gradients[0] += static_cast<double>(mb.size());
      return 0.0;
    });
  });
  while (!inside) std::this_thread::yield();
  EXPECT_THROW(trainer.step(8, [](const MicroBatch&, Trainer::Replica&) { return 1.0; }), InvalidArgument);
  go = true;
  first.join();
  EXPECT_EQ(trainer.gradients()[0], 1.0);
}

TEST(DataParallel, RunsAThousandStepsOnTheSameWorkers) {
  DataParallel trainer(host_group(4), {.parameter_count = 100});
  for (int step = 0; step < 1000; ++step) {
    const Objective loss = trainer.step(16, [](const MicroBatch& mb, Replica& replica) {
      replica.gradients[0] += static_cast<float>(mb.size());
      return static_cast<double>(mb.size());
    });
    ASSERT_EQ(loss.value(), 1.0);
    ASSERT_EQ(trainer.gradients()[0], 1.0F);
  }
  EXPECT_FALSE(trainer.explain().empty());
}

TEST(DataParallel, UpdatesEveryParameterOnceOnAllWorkers) {
  for (const std::size_t devices : {1U, 2U, 3U}) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{65536}, std::size_t{400003}}) {
      Trainer trainer(host_group(devices), {.parameter_count = count});
      std::vector<std::atomic<int>> times(count);
      std::atomic<std::size_t> parts = 0;
      trainer.update([&](std::size_t begin, std::size_t end) {
        ++parts;
        for (std::size_t i = begin; i < end; ++i) ++times[i];
      });
      for (const auto& n : times) ASSERT_EQ(n, 1);
      if (devices == 1 || count <= 65536) {
        EXPECT_EQ(parts, 1U) << "too little to divide";
      } else {
        EXPECT_GE(parts, devices);
      }
    }
  }
}

TEST(DataParallel, AnUpdateThatThrowsSaysSoAndTheTrainerGoesOn) {
  Trainer trainer(host_group(2), {.parameter_count = 400000});
  try {
    trainer.update([](std::size_t, std::size_t) { throw std::out_of_range("the user's own"); });
    FAIL();
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "the user's own");
  }
  std::atomic<std::size_t> updated = 0;
  trainer.update([&](std::size_t begin, std::size_t end) { updated += end - begin; });
  EXPECT_EQ(updated, 400000U);
  EXPECT_EQ(
      trainer.step(4, [](const MicroBatch& mb, Trainer::Replica&) { return static_cast<double>(mb.size()); }).value(),
      1.0);
}

TEST(DataParallel, RunsAgainInSmallerPiecesWhereMemoryRunsOut) {
  const Regression data(64, 9, 3);
  Trainer trainer(host_group(2), {.parameter_count = 9, .balance = Balance::even});
  const auto within = [&](std::int64_t most, auto error) {
    return [&data, most, error](const MicroBatch& mb, Trainer::Replica& replica) {
      const double sum = data.add(mb.begin, mb.end, replica.parameters, replica.gradients);
      if (mb.size() > most) throw error;  // after it has added to the gradients
      return sum;
    };
  };
  std::vector<double> expected(9, 0.0);
  data.add(0, 64, trainer.parameters(), expected);
  const auto expect_gradients = [&] {
    for (std::size_t j = 0; j < 9; ++j) EXPECT_NEAR(trainer.gradients()[j], expected[j] / 64.0, 1e-12);
  };
  trainer.step(64, within(6, OutOfMemory("as planned")));
  expect_gradients();
  EXPECT_TRUE(says(trainer.explain(), "host: at most 4 items at once"));
  trainer.step(64, within(3, std::bad_alloc()));
  expect_gradients();
  EXPECT_THROW(trainer.step(64, within(0, OutOfMemory("as planned"))), OutOfMemory);
  EXPECT_THROW(trainer.step(64, within(0, std::runtime_error("another"))), Error);
}

TEST(DataParallel, KeepsToAMemoryLimit) {
  const Regression data(64, 9, 4);
  Trainer trainer(host_group(2), {.parameter_count = 9, .balance = Balance::even, .memory_limits = {1000, 0}});
  std::atomic<std::int64_t> longest{0};
  for (int step = 0; step < 2; ++step) {
    longest = 0;
    trainer.step(64, [&](const MicroBatch& mb, Trainer::Replica& replica) {
      if (mb.device == 0) {
        EXPECT_EQ(mb.measure, step == 0 && longest < 4);
        longest = std::max(longest.load(), mb.size());
        replica.memory_bytes = 100 * mb.size();
      }
      return data.add(mb.begin, mb.end, replica.parameters, replica.gradients);
    });
    std::vector<double> expected(9, 0.0);
    data.add(0, 64, trainer.parameters(), expected);
    for (std::size_t j = 0; j < 9; ++j) EXPECT_NEAR(trainer.gradients()[j], expected[j] / 64.0, 1e-12);
  }
  EXPECT_LE(longest, 10);
  ASSERT_EQ(trainer.memory_report().size(), 1U);
  EXPECT_EQ(trainer.memory_report()[0].items->largest_micro_batch, 10);
  EXPECT_THROW(Trainer(host_group(2), {.parameter_count = 9, .memory_limits = {1000}}), InvalidArgument);
  EXPECT_THROW(Trainer(host_group(1), {.parameter_count = 9, .memory_limits = {-1}}), InvalidArgument);
}

}  // namespace
}  // namespace paceline
