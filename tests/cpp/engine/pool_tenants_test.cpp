// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pool.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.hpp>

#include "gate.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

std::map<std::string, plan::PoolTenantUse> tenants_of(const Pool& pool) {
  std::map<std::string, plan::PoolTenantUse> found;
  for (plan::PoolTenantUse& one : pool.tenants()) found[one.tenant.name] = one;
  return found;
}

TEST(PoolTenants, TakeTurnsByWeightAndCost) {
  Gate gate;
  std::string order;
  Pool pool(host_group(1));
  pool.add_tenant({.name = "b", .weight = 2.0});
  const auto first = pool.submit([&](Job&) { gate.pass(); });
  std::vector<Future<void>> all;
  const auto note = [&](const std::string& tenant, double cost) {
    all.push_back(pool.submit([&order, tenant](Job&) { order += tenant; }, {.tenant = tenant, .charge = cost}));
  };
  for (int k = 0; k < 4; ++k) note("a", 1.0);
  for (int k = 0; k < 4; ++k) note("b", 1.0);
  note("c", 3.0);
  note("c", 3.0);
  EXPECT_EQ(tenants_of(pool)["a"].waiting, 4);
  const std::string text = pool.explain();
  EXPECT_NE(text.find("Tenants, by what waits: b 4 wait, 0 served, weight 2; a 4 wait, 0 served, weight 1; c 2 wait, 0 "
                      "served, weight 1."),
            std::string::npos)
      << text;
  gate.open();
  for (const Future<void>& one : all) one.get();
  // Tags of a: 0, 1, 2, 3. Of b: 0, .5, 1, 1.5. Of c: 0, 3. At a tie the job goes first that came first.
  EXPECT_EQ(order, "abcbabbaac");
  const auto after = tenants_of(pool);
  EXPECT_EQ(after.at("a").served, 4.0);
  EXPECT_EQ(after.at("c").served, 6.0);
  EXPECT_EQ(after.at("").tenant.weight, 1.0);
}

TEST(PoolTenants, AreNamedOnce) {
  Pool pool(host_group(1));
  EXPECT_EQ(pool.tenants().size(), 1);
  EXPECT_EQ(pool.explain().find("Tenants"), std::string::npos);
  pool.submit([](Job&) {}, {.tenant = "a"}).get();
  EXPECT_THROW(pool.add_tenant({.name = "a"}), InvalidArgument);
  EXPECT_THROW(pool.add_tenant({.name = ""}), InvalidArgument);
  EXPECT_THROW(pool.add_tenant({.name = "b", .weight = -1.0}), InvalidArgument);
  pool.add_tenant({.name = "b", .weight = 3.0});
  EXPECT_EQ(tenants_of(pool)["b"].tenant.weight, 3.0);
  EXPECT_THROW((void)pool.submit([](Job&) {}, {.charge = std::numeric_limits<double>::infinity()}), InvalidArgument);
}

TEST(PoolTenants, KeepToTheirQuotas) {
  Gate gate;
  Pool pool(host_group(2));
  pool.add_tenant({.name = "a", .devices = 1, .memory_bytes = 100.0});
  const auto one = pool.submit([&](Job&) { gate.pass(); }, {.memory_bytes = 60.0, .tenant = "a"});
  const auto held = pool.submit([](Job&) {}, {.tenant = "a"});
  pool.submit([](Job&) {}, {.tenant = "b"}).get();  // the other device
  EXPECT_FALSE(held.ready());
  EXPECT_EQ(tenants_of(pool)["a"].devices, 1);
  EXPECT_EQ(tenants_of(pool)["a"].memory_bytes, 60.0);
  gate.open();
  held.get();
  const auto why = [&](const JobOptions& options) {
    try {
      pool.submit([](Job&) {}, options).get();
    } catch (const Rejected& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(why({.gang = 2, .tenant = "a"}),
            "The job was not taken: alone it needs 2 devices at once, and the quota of tenant 'a' is 1, so it could "
            "never start. Let it need less, or give the tenant more.");
  EXPECT_EQ(why({.memory_bytes = 101.0, .tenant = "a"}),
            "The job was not taken: alone it needs 101 bytes at once, and the quota of tenant 'a' is 100 bytes, so it "
            "could never start. Let it need less, or give the tenant more.");
}

using Requests = std::span<int>;

Batcher<int, int> serve(Pool& pool, int factor, const std::string& kind) {
  return pool.serve<int, int>(
      [factor](Job&, Requests requests, Requests answers) {
        for (std::size_t k = 0; k < requests.size(); ++k) answers[k] = factor * requests[k];
      },
      {.max_batch = 4}, kind);
}

TEST(PoolKinds, AreForgottenAndServedAnew) {
  Gate gate;
  Pool pool(host_group(1));
  EXPECT_TRUE(pool.forget("never heard of"));
  const auto old = serve(pool, 2, "model");
  EXPECT_EQ(old.submit(21).get(), 42);
  const auto blocker = pool.submit([&](Job&) { gate.pass(); }, {.kind = "blocks", .memory_bytes = 1.0});
  const auto waits = old.submit(1);
  EXPECT_FALSE(pool.forget("model"));
  EXPECT_FALSE(pool.forget("blocks"));
  gate.open();
  EXPECT_EQ(waits.get(), 2);
  EXPECT_TRUE(pool.forget("model"));
  EXPECT_TRUE(pool.forget("blocks"));
  EXPECT_THROW((void)old.submit(1), InvalidArgument);
  const auto other = serve(pool, 5, "other");  // it takes the number of one that is gone
  EXPECT_THROW((void)old.submit(1), InvalidArgument);
  const auto again = serve(pool, 3, "model");
  EXPECT_EQ(other.submit(2).get(), 10);
  EXPECT_EQ(again.submit(2).get(), 6);
  EXPECT_EQ(old.submit(2).get(), 6) << "a batcher has its kind by the name";
  pool.submit([](Job&) {}, {.kind = "blocks"}).get();
}

TEST(PoolKinds, MayHaveAModelThatIsFreedOutsideOfThePool) {
  Pool pool(host_group(1));
  const std::string device = pool.active().at(0);
  const auto batcher =
      pool.serve<int, int>([](Job&, Requests, Requests) {}, {.model = "m", .resident_bytes = 1.0}, "a");
  EXPECT_FALSE(pool.unload(device, "m"));
  (void)batcher.submit(1).get();
  EXPECT_FALSE(pool.unload("no such device", "m"));
  EXPECT_TRUE(pool.unload(device, "m"));
  EXPECT_FALSE(pool.unload(device, "m"));
}

// What a call holds may use the pool when it ends.
TEST(PoolKinds, LetGoOfTheirCallsWithoutTheLock) {
  struct Asks {
    Pool* pool;
    std::int64_t* found;
    ~Asks() { *found = pool->waiting() + 1; }
  };
  std::int64_t found = 0;
  Pool pool(host_group(1));
  {
    const auto asks = std::make_shared<Asks>(&pool, &found);
    (void)pool.serve<int, int>([asks](Job&, Requests, Requests) {}, {}, "model");
  }
  EXPECT_EQ(found, 0);
  EXPECT_TRUE(pool.forget("model"));
  EXPECT_EQ(found, 1);
}

// What was given up goes on in the call of its kind.
TEST(PoolKinds, StayWhileARunThatWasGivenUpGoesOn) {
  Gate gate;
  Pool pool(host_group(1));
  const auto batcher = pool.serve<int, int>([&gate](Job&, Requests, Requests) { gate.pass(); }, {}, "hangs");
  const auto request = batcher.submit(1);
  for (bool found = false; !found;) {
    std::vector<plan::RunId> over;
    pool.visit_runs_over(0.0, [&](plan::RunId run, const Device&, const std::string&,
                                  std::span<internal::PoolCall* const>) { over.push_back(run); });
    for (const plan::RunId run : over) found |= pool.give_up(run, std::make_exception_ptr(Timeout("it hangs")));
  }
  EXPECT_THROW((void)request.get(), Timeout);
  EXPECT_FALSE(pool.forget("hangs"));
  gate.open();
  while (!pool.forget("hangs")) std::this_thread::yield();
}

}  // namespace
}  // namespace paceline
