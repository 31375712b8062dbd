// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pool.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

using std::chrono::milliseconds;

std::string why(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& one) {
    return one.what();
  }
}

template <class T>
std::string why(const Future<T>& future) {
  try {
    (void)future.get();
  } catch (...) {
    return why(std::current_exception());
  }
  return "";
}

/// What is nested in the Cancelled of a job.
std::string cause_of(const Future<void>& job) {
  try {
    job.get();
  } catch (const Cancelled& error) {
    try {
      std::rethrow_if_nested(error);
    } catch (const std::exception& cause) {
      return cause.what();
    }
  }
  return "";
}

TEST(PoolOptions, TheErrorOfAJobIsTheCauseThatOthersAreCancelled) {
  Pool pool(host_group(2));
  std::promise<void> go_on;
  const auto bad = pool.submit([on = go_on.get_future().share()](Job&) {
    on.wait();
    throw std::runtime_error("bad");
  });
  std::vector<Future<void>> chain;
  for (int k = 0; k < 10; ++k)
    chain.push_back(pool.submit([](Job&) {}, {.after = {k == 0 ? JobHandle(bad) : JobHandle(chain.back())}}));
  const auto other = pool.submit([](Job&) {}, {.after = {chain.front(), bad}});
  const auto cancelled = pool.submit([](Job&) {}, {.not_before_seconds = 1000.0});
  const auto after = pool.submit([](Job&) {}, {.after = {cancelled}});
  EXPECT_TRUE(cancelled.cancel());
  EXPECT_NE(cause_of(after).find("cancelled before it began"), std::string::npos);
  go_on.set_value();
  EXPECT_EQ(cause_of(chain.front()), "bad");
  EXPECT_EQ(cause_of(chain.back()), "bad");
  EXPECT_EQ(cause_of(other), "bad");
  EXPECT_EQ(cause_of(pool.submit([](Job&) {}, {.after = {chain.back()}})), "bad");  // all ended long ago
}

TEST(PoolOptions, JobsRunWhereTheirMemoryFits) {
  Pool pool(host_group(2), {}, 0.1, {{"host:0", 10.0}, {"host:1", 40.0}});
  for (int k = 0; k < 5; ++k)
    EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }, {.memory_bytes = 20.0}).get(), "host:1");
  const std::string text = why(pool.submit([](Job&) {}, {.memory_bytes = 50.0}));
  EXPECT_NE(text.find("with 50 bytes for it. The pool has host:0 (host, 10 bytes), host:1"), std::string::npos) << text;
  EXPECT_THROW(Pool(host_group(1), {}, 0.1, {{"host:7", 1.0}}), InvalidArgument);
}

TEST(PoolOptions, JobsRunOnTheDevicesThatTheyName) {
  Pool pool(host_group(3));
  for (int k = 0; k < 5; ++k) {
    const auto job = pool.submit([](Job& one) { return one.device().name; }, {.devices = {"host:2", "host:9"}});
    EXPECT_EQ(job.get(), "host:2");
  }
  const std::string text = why(pool.submit([](Job&) {}, {.needs = {"host"}, .devices = {"host:9"}}));
  EXPECT_NE(text.find("with the labels host, out of host:9"), std::string::npos) << text;
}

TEST(PoolOptions, ModelsAreEvictedBeforeWhatNeedsTheirMemoryAndLoadedAgain) {
  std::vector<std::string> loaded;
  std::multiset<std::string> resident;
  Pool pool(host_group(1), {}, 0.1, {{"host:0", 250.0}});
  const auto serve = [&](const std::string& name) {
    pool.add_batches(name, {.max_batch = 1, .model = name, .resident_bytes = 100.0},
                     [&, name](Job& job, std::span<internal::PoolCall* const> calls) {
                       for (const Job::Eviction& one : job.evicted()) resident.erase(one.model);
                       if (!resident.contains(name)) {
                         resident.insert(name);
                         loaded.push_back(name);
                         job.loaded(0.0);
                       }
                       EXPECT_LE(resident.size(), 2U);
                       static_cast<internal::RequestCall<int, int>*>(calls[0])->answer(1);
                     });
  };
  const auto ask = [&](const std::string& name) {
    auto result = std::make_shared<internal::JobResult<int>>();
    auto call = std::make_unique<internal::RequestCall<int, int>>(1, result);
    (void)pool.submit_call(std::move(call), result, {.kind = name});
    result->wait();
    EXPECT_EQ(result->error(), nullptr);
  };
  for (const char* name : {"a", "b", "c"}) serve(name);
  for (const char* name : {"a", "b", "a", "b", "c", "c"}) ask(name);
  EXPECT_EQ(loaded, (std::vector<std::string>{"a", "b", "c"}));
  const auto all = pool.submit([&](Job& job) { return job.evicted().size(); }, {.memory_bytes = 200.0});
  EXPECT_EQ(all.get(), 2U);
}

TEST(PoolOptions, WhatIsExcludedSaysNothingOfTheSpeed) {
  for (const bool excludes : {false, true}) {
    Pool pool(host_group(1));
    const auto job = [&](Job& one) {
      const auto begin = std::chrono::steady_clock::now();
      std::this_thread::sleep_for(milliseconds(300));
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (excludes) one.exclude(took.count());
    };
    for (int k = 0; k < 4; ++k) EXPECT_GE(pool.submit(job).report().seconds, 0.3);
    EXPECT_EQ(why(pool.submit([](Job&) {}, {.deadline_seconds = 0.3})).empty(), excludes);
  }
}

TEST(PoolOptions, BatchesTakeAsLongAsTheirNumberOfTheCostliestRequest) {
  Pool pool(host_group(1));
  const auto batch = pool.serve<int, int>(
      [](Job&, std::span<int> in, std::span<int> out) {
        std::this_thread::sleep_for(milliseconds(*std::ranges::max_element(in)) * static_cast<int>(in.size()));
        std::ranges::copy(in, out.begin());
      },
      {.max_batch = 4, .padded = true});
  for (const int k : {2, 30, 4, 20}) EXPECT_EQ(batch.submit(k, {.cost = static_cast<double>(k)}).get(), k);
  EXPECT_THROW((void)batch.submit(100, {.deadline_seconds = 0.05, .cost = 100.0}).get(), Rejected);
  EXPECT_EQ(batch.submit(5, {.deadline_seconds = 1.0, .cost = 5.0}).get(), 5);
  EXPECT_THROW((void)batch.submit(5, {.cost = 0.0}), InvalidArgument);
  EXPECT_THROW((void)pool.submit([](Job&) {}, {.cost = 2.0}), InvalidArgument);
}

TEST(PoolOptions, ADeviceThatJoinsHasTheMemoryThatIsNamed) {
  Pool pool(host_group(1), {}, 0.1, {{"host:0", 10.0}});
  const Device second = host_group(2).devices()[1];
  EXPECT_THROW(pool.add(second, 0.0), InvalidArgument);
  pool.add(second, 40.0);
  EXPECT_EQ(pool.submit([](Job& job) { return job.device().name; }, {.memory_bytes = 40.0}).get(), "host:1");
  const std::string text = why(pool.submit([](Job&) {}, {.memory_bytes = 50.0}));
  EXPECT_NE(text.find("host:1 (host, 40 bytes)"), std::string::npos) << text;
}

// Gives up the runs that have taken longer than some milliseconds, until there was one.
void give_up_one(Pool& pool, const std::string& kind, const std::string& on = "host:0") {
  for (bool found = false; !found;) {
    std::vector<plan::RunId> over;
    pool.visit_runs_over(0.01, [&](plan::RunId run, const Device& device, const std::string& name, auto calls) {
      EXPECT_EQ(device.name, on);
      EXPECT_EQ(name, kind);
      EXPECT_GE(calls.size(), 1U);
      over.push_back(run);
    });
    for (const plan::RunId run : over) found |= pool.give_up(run, std::make_exception_ptr(Timeout("it hangs")));
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(PoolOptions, AJobThatIsGivenUpLeavesItsDeviceToOthers) {
  Gate gate;
  std::atomic<int> back = 0;
  std::thread::id first;
  Pool pool(host_group(1));
  const auto hangs = pool.submit(
      [&](Job&) {
        first = std::this_thread::get_id();
        gate.pass();
        ++back;
        return 3;
      },
      {.kind = "stuck"});
  const auto after = pool.submit([](Job&) {}, {.after = {hangs}});
  give_up_one(pool, "stuck");
  EXPECT_EQ(why(hangs), "it hangs");
  EXPECT_THROW(after.get(), Cancelled);
  EXPECT_EQ(pool.running(), 0);
  EXPECT_NE(pool.submit([](Job&) { return std::this_thread::get_id(); }).get(), first);
  gate.open();
  while (back == 0) std::this_thread::yield();
  for (int k = 0; k < 50; ++k) EXPECT_NE(pool.submit([](Job&) { return std::this_thread::get_id(); }).get(), first);
  EXPECT_EQ(why(hangs), "it hangs");
  pool.close();
}

TEST(PoolOptions, ABatchThatIsGivenUpDoesNotRunAgain) {
  Gate gate;
  std::atomic<int> calls = 0;
  std::atomic<int> back = 0;
  Pool pool(host_group(1));
  Gate held;
  const auto first = pool.submit([&](Job&) { held.pass(); }, {.kind = "held"});
  const auto batch = pool.serve<int, int>(
      [&](Job&, std::span<int> in, std::span<int> out) {
        ++calls;
        if (in[0] == 13) {
          gate.pass();
          ++back;
        }
        std::ranges::copy(in, out.begin());
      },
      {.max_batch = 4}, "batch");
  std::vector<Future<int>> all;
  for (const int k : {13, 1, 2, 3}) all.push_back(batch.submit(k));
  held.open();
  first.get();
  give_up_one(pool, "batch");
  for (const auto& one : all) EXPECT_EQ(why(one), "it hangs");
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(batch.submit(7).get(), 7);
  gate.open();
  while (back == 0) std::this_thread::yield();
  EXPECT_EQ(batch.submit(8).get(), 8);
}

TEST(PoolOptions, APoolIsClosedAndGoneWhileItsJobGoesOn) {
  Gate gate;
  std::atomic<int> back = 0;
  {
    Pool pool(host_group(1));
    const auto hangs = pool.submit(
        [&](Job&) {
          gate.pass();
          ++back;
        },
        {.kind = "stuck"});
    give_up_one(pool, "stuck");
    EXPECT_EQ(why(hangs), "it hangs");
    pool.close();
  }
  Pool other(host_group(1));
  EXPECT_EQ(other.submit([](Job&) { return 1; }).get(), 1);
  EXPECT_EQ(back, 0);
  gate.open();
  while (back == 0) std::this_thread::yield();
}

TEST(PoolOptions, AJobOfADeviceThatJoinedIsGivenUpThere) {
  Gate gate;
  std::atomic<int> back = 0;
  std::thread::id first;
  Pool pool(host_group(1));
  pool.add(host_group(2).devices()[1]);
  const auto hangs = pool.submit(
      [&](Job&) {
        first = std::this_thread::get_id();
        gate.pass();
        ++back;
      },
      {.kind = "stuck", .needs = {"host:1"}});
  give_up_one(pool, "stuck", "host:1");
  EXPECT_EQ(why(hangs), "it hangs");
  const auto next = pool.submit([](Job&) { return std::this_thread::get_id(); }, {.needs = {"host:1"}});
  EXPECT_NE(next.get(), first);
  gate.open();
  while (back == 0) std::this_thread::yield();
}

TEST(PoolOptions, AStepGoesOnWithTheWorkerThatReplacesAnother) {
  Gate gate;
  std::atomic<bool> begun = false;
  std::atomic<int> back = 0;
  DeviceGroup group = host_group(2);
  Pool pool(group);
  const auto hangs = pool.submit(
      [&](Job&) {
        begun = true;
        gate.pass();
        ++back;
      },
      {.kind = "stuck", .needs = {"host:0"}});
  while (!begun) std::this_thread::yield();
  std::atomic<int> ran = 0;
  auto call = group.async([&](const Device&) { return ++ran; });  // either worker may make it
  give_up_one(pool, "stuck");
  EXPECT_EQ(call.get(), 1);
  const auto both = pool.submit([](Job& job) { return job.devices().size(); }, {.gang = 2});
  EXPECT_EQ(both.get(), 2U);
  gate.open();
  while (back == 0) std::this_thread::yield();
}

}  // namespace
}  // namespace paceline
