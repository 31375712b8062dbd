// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/random.hpp>
#include <paceline/sim/pool.hpp>

namespace paceline::sim {
namespace {

constexpr double kMargin = 1.3;   // of plan::PoolOptions, until ten runs have ended
constexpr double kAtOnce = 1e12;  // a load at which all requests arrive within a picosecond or so

/// What an EASY backfilling queue makes of jobs that come in this order, each a moment after the one before, and take
/// 1 s at speed 1. Written without the library: after each event it goes over all that waits, from the start.
class Easy {
 public:
  Easy(const std::vector<bool>& pattern, std::vector<double> speeds, std::size_t size)
      : size_(size), devices_(speeds.size()) {
    for (std::size_t d = 0; d < speeds.size(); ++d) devices_[d].seconds = 1.0 / speeds[d];
    for (const bool gang : pattern) {
      now_ += 1e-10;
      waiting_.push_back(gang);
      start_all();
    }
    while (true) {
      const Device& first = std::ranges::min(devices_, {}, &Device::ends);
      if (first.ends.first == kNever) break;
      note(first.ends.first - now_);
      now_ = first.ends.first;
      const std::size_t run = first.ends.second;
      for (Device& one : devices_)
        if (one.ends.second == run) one.ends = {kNever, 0};
      start_all();
    }
  }

  double idle = 0.0;
  double reserved = 0.0;
  double worked = 0.0;
  double gang_waits = 0.0;  // in sum
  double other_waits = 0.0;
  std::size_t gangs = 0;
  std::size_t others = 0;
  std::size_t backfilled = 0;
  [[nodiscard]] double elapsed() const { return now_; }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Device {
    double seconds = 1.0;
    std::pair<double, std::size_t> ends = {kNever, 0};  // and the number of the run from 1
    bool reserved = false;
    [[nodiscard]] bool busy() const { return ends.second != 0; }
  };

  void note(double seconds) {
    if (std::ranges::count(waiting_, true) == 0) return;
    for (const Device& one : devices_) {
      if (one.busy()) continue;
      idle += seconds;
      if (one.reserved && std::ranges::count(waiting_, false) > 0) reserved += seconds;
    }
  }

  void start_all() {
    while (start_one()) continue;
  }

  bool start_one() {
    for (Device& one : devices_) one.reserved = false;
    double until = kNever;
    for (auto job = waiting_.begin(); job != waiting_.end(); ++job) {
      std::vector<Device*> free;
      for (Device& one : devices_) {
        const bool in_time = !*job && now_ + kMargin * one.seconds <= until;
        if (!one.busy() && (!one.reserved || in_time)) free.push_back(&one);
      }
      std::ranges::stable_sort(free, {}, &Device::seconds);
      const std::size_t needed = *job ? size_ : 1;
      if (free.size() >= needed) {
        free.resize(needed);
        start(job, free);
        return true;
      }
      if (!*job || until < kNever) continue;
      std::vector<Device*> order;
      for (Device& one : devices_) order.push_back(&one);
      const auto free_at = [&](const Device* one) { return one->busy() ? one->ends.first : now_; };
      std::ranges::stable_sort(order, {}, free_at);
      for (std::size_t k = 0; k < size_; ++k) order[k]->reserved = true;
      until = free_at(order[size_ - 1]);
    }
    return false;
  }

  void start(std::vector<bool>::iterator job, const std::vector<Device*>& on) {
    ++runs_;
    const double seconds = on.back()->seconds;  // the slowest
    for (Device* one : on) one->ends = {now_ + seconds, runs_};
    worked += static_cast<double>(on.size()) * seconds;
    (*job ? gang_waits : other_waits) += now_;
    ++(*job ? gangs : others);
    if (!*job && std::count(waiting_.begin(), job, true) > 0) ++backfilled;
    waiting_.erase(job);
  }

  std::size_t size_;
  std::vector<Device> devices_;
  std::vector<bool> waiting_;  // in their order: whether it is a gang
  std::size_t runs_ = 0;
  double now_ = 0.0;
};

PoolSimulationOptions at_once(std::vector<double> speeds, std::int64_t requests) {
  return {.speeds = std::move(speeds),
          .pool = {.placement = plan::Placement::any},
          .per_item_seconds = 1.0,
          .load = kAtOnce,
          .variation = 0.0,
          .requests = requests};
}

bool is(const PoolSimulationResult& found, const Easy& easy, std::size_t devices) {
  const auto near = [](double a, double b) { return std::abs(a - b) < 1e-6; };
  const auto per = [](double sum, double count) { return count > 0.0 ? sum / count : 0.0; };
  const double all = easy.elapsed() * static_cast<double>(devices);
  const auto others = static_cast<double>(easy.others);
  return near(found.elapsed_seconds, easy.elapsed()) &&
         near(std::accumulate(found.busy.begin(), found.busy.end(), 0.0) * found.elapsed_seconds, easy.worked) &&
         near(found.gangs.idle * all, easy.idle) && near(found.gangs.reserved * all, easy.reserved) &&
         near(found.gangs.backfilled * others, static_cast<double>(easy.backfilled)) &&
         near(found.gangs.waits.mean_seconds, per(easy.gang_waits, static_cast<double>(easy.gangs))) &&
         near(found.gangs.other_waits.mean_seconds, per(easy.other_waits, others));
}

// The test does not know which jobs are gangs, so it tries all that it can be.
TEST(SimulatedGangs, AreServedAndCountedAsByAnIndependentBackfillingQueue) {
  constexpr std::size_t jobs = 8;
  double reserved = 0.0;
  double backfilled = 0.0;
  for (const std::vector<double>& speeds : {std::vector{1.0, 1.0}, {1.0, 1.0, 0.5}, {1.0, 0.5, 0.25, 0.25}}) {
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      PoolSimulationOptions options = at_once(speeds, jobs);
      options.gang = seed % 2 == 0 ? 2 : std::ssize(speeds);
      options.gang_part = 0.35;
      options.seed = seed;
      const PoolSimulationResult found = simulate_pool(options);
      bool same = false;
      for (unsigned pattern = 0; pattern < 1U << jobs && !same; ++pattern) {
        std::vector<bool> which;
        for (std::size_t j = 0; j < jobs; ++j) which.push_back((pattern >> j & 1U) != 0);
        same = is(found, Easy(which, speeds, static_cast<std::size_t>(options.gang)), speeds.size());
      }
      EXPECT_TRUE(same) << "seed " << seed << ", " << speeds.size() << " devices";
      reserved += found.gangs.reserved;
      backfilled += found.gangs.backfilled;
    }
  }
  EXPECT_GT(reserved, 0.0);
  EXPECT_GT(backfilled, 0.0);
}

TEST(SimulatedGangs, OfAllDevicesRunOneAfterTheOther) {
  PoolSimulationOptions options = at_once({1.0, 0.5}, 9);
  options.gang_part = 1.0;
  const PoolSimulationResult found = simulate_pool(options);
  EXPECT_NEAR(found.elapsed_seconds, 18.0, 1e-6) << "each takes what the slower device takes";
  EXPECT_NEAR(found.gangs.waits.mean_seconds, 8.0, 1e-6);
  EXPECT_NEAR(found.gangs.waits.p99_seconds, 16.0, 1e-6);
  EXPECT_NEAR(found.busy.at(0) + found.busy.at(1), 2.0, 1e-9);
  EXPECT_EQ(found.gangs.other_waits.mean_seconds, 0.0);
  EXPECT_EQ(found.mean_batch, 1.0);
  EXPECT_EQ(found.batches, (std::vector<std::int64_t>{9, 9}));
}

// Half of all jobs are gangs of two: three jobs' worth for two jobs.
TEST(SimulatedGangs, CountInTheLoadForEachOfTheirDevices) {
  PoolSimulationOptions options{.speeds = {1.0, 1.0, 1.0, 1.0}, .load = 0.4, .variation = 0.0, .gang_part = 0.5};
  const PoolSimulationResult found = simulate_pool(options);
  for (const double one : found.busy) EXPECT_GT(one, 0.1);
  EXPECT_NEAR(std::accumulate(found.busy.begin(), found.busy.end(), 0.0) / 4.0, 0.4, 0.01);
}

TEST(SimulatedStages, RunOneAfterTheOtherAndAnEarlierRequestFirst) {
  PoolSimulationOptions options = at_once({1.0}, 2);
  options.stages = 3;
  const PoolSimulationResult one = simulate_pool(options);
  EXPECT_NEAR(one.p50_seconds, 6.0, 1e-6);
  EXPECT_NEAR(one.mean_seconds, 4.5, 1e-6) << "all stages of the first one, then those of the second one";
  options.speeds = {1.0, 1.0};
  const PoolSimulationResult two = simulate_pool(options);
  EXPECT_NEAR(two.mean_seconds, 3.0, 1e-6);
  EXPECT_NEAR(two.elapsed_seconds, 3.0, 1e-6);
  options.speeds = {1.0, 1.0, 1.0};
  EXPECT_NEAR(simulate_pool(options).mean_seconds, 3.0, 1e-6) << "no stage runs beside another one of its request";
  EXPECT_NEAR(simulate_pool({.load = 0.5, .stages = 4}).elapsed_seconds,
              4.0 * simulate_pool({.load = 0.5}).elapsed_seconds, 1.0);
}

// Without noise a job that starts ends in time. Each request has one outcome, whatever becomes of its stages.
TEST(SimulatedStages, EndNoRequestLateWithoutNoise) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    plan::Random random(seed, 0, 0);
    PoolSimulationOptions options{.speeds = {1.0, 1.0, 0.5}, .variation = 0.0, .requests = 1500, .seed = seed};
    options.load = 0.6 + 0.8 * random.uniform();
    options.stages = 1 + static_cast<std::int64_t>(seed % 3);
    options.gang_part = seed % 2 == 0 ? 0.0 : 0.3 * random.uniform();
    options.deadline_seconds = (0.015 + 0.05 * random.uniform()) * static_cast<double>(options.stages);
    if (seed % 5 == 0) options.sizes = {1, 2, 4};
    if (seed % 7 == 0) options.length_variation = 0.5;
    if (seed % 4 == 0) options.tenants = {{.weight = 2.0}, {.weight = 1.0}};
    const PoolSimulationResult found = simulate_pool(options);
    EXPECT_EQ(found.late, 0.0) << "seed " << seed;
    EXPECT_NEAR(found.in_time + found.rejected + found.expired, 1.0, 1e-9) << "seed " << seed;
    EXPECT_GT(found.in_time, 0.0);
  }
}

TEST(SimulatedStages, KeepTheBoundOfTenantsAndGangsHaveNone) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    PoolSimulationOptions options{.speeds = {1.0, 0.5}, .load = 1.5, .requests = 2000, .seed = seed};
    options.tenants = {{.weight = 3.0}, {.weight = 1.0}};
    options.stages = 3;
    const double found = simulate_pool(options).unfairness;
    EXPECT_LE(found, 1.0 + 1e-9);
    EXPECT_GT(found, 0.3);
    options.gang_part = 0.1;
    EXPECT_TRUE(std::isnan(simulate_pool(options).unfairness));
  }
}

TEST(SimulatedGangs, RefuseWhatMakesNoSense) {
  EXPECT_THROW((void)simulate_pool({.gang_part = -0.1}), InvalidArgument);
  EXPECT_THROW((void)simulate_pool({.gang_part = 1.1}), InvalidArgument);
  EXPECT_THROW((void)simulate_pool({.gang_part = 0.1, .gang = 1}), InvalidArgument);
  EXPECT_THROW((void)simulate_pool({.speeds = {1.0}, .gang_part = 0.1}), InvalidArgument);
  EXPECT_THROW((void)simulate_pool({.stages = 0}), InvalidArgument);
}

}  // namespace
}  // namespace paceline::sim
