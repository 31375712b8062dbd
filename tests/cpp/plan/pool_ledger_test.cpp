// SPDX-License-Identifier: Apache-2.0
//
// What a pool writes. tests/python/test_replay_pool.py reads it, and repeats the decisions.
#include <paceline/plan/pool_ledger.hpp>

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <sstream>
#include <string>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>

namespace paceline::plan {
namespace {

TEST(PoolLedger, HasALineForEachEventWithWhatWasDecided) {
  const auto out = std::make_shared<std::ostringstream>();
  PoolState pool({.samples = 1});
  (void)pool.add_kind({.name = "a \"b\"", .sizes = {1, 2}});
  (void)pool.add_device(0.25, {.name = "d:0", .labels = {"x"}});
  pool.write_to(out);
  EXPECT_TRUE(pool.writes_ledger());
  const std::size_t need = pool.add_need({.labels = {"y"}});
  (void)pool.add_device(0.5, {.name = "d:1", .labels = {"y"}, .memory_bytes = 7.0});
  PoolState copy = pool;
  JobId job{};
  (void)copy.submit(0.5, {.need = need}, job);
  EXPECT_FALSE(copy.writes_ledger());
  const PoolDecisions decided =
      pool.submit(1.0, {.need = need, .priority = Priority::batch, .deadline_seconds = 0.1}, job);
  ASSERT_EQ(decided.starts.size(), 1);
  (void)pool.measure(1.0, 1, 0, CostModel::affine(0.5, 1.0 / 3.0), 3);
  (void)pool.submit(1.0, {.need = need, .deadline_seconds = 0.25}, job);
  (void)pool.tick(1.5);
  (void)pool.finish(2.0, decided.starts.front().run, RunResult::completed, 0.75);
  EXPECT_EQ(
      out->str(),
      R"({"paceline_pool_ledger": 1, "options": {"placement": "auto", "decline": 0.5, "probe_seconds": 5, "samples": 1, "margin": 1.3, "memory_margin_bytes": 0, "patience": [0.1, 1, 60, 60]}}
{"add_kind": {"name": "a \"b\"", "sizes": [1, 2]}}
{"at": 0.25, "add_device": {"name": "d:0", "device_class": "", "labels": ["x"], "accepted": []}}
{"add_need": {"accepted": [false]}}
{"at": 0.5, "add_device": {"name": "d:1", "device_class": "", "labels": ["y"], "memory_bytes": 7, "accepted": [true]}}
{"at": 1, "submit": {"kind": 0, "need": 1, "priority": "batch", "deadline_seconds": 0.1}, "job": 4194304, "decided": {"starts": [{"run": 1048577, "devices": [1], "jobs": [4194304], "kind": 0, "cost": 1, "predicted_seconds": null}]}}
{"at": 1, "measure": {"device": 1, "kind": 0, "model": [0.5, 0.3333333333333333], "samples": 3}}
{"at": 1, "submit": {"kind": 0, "need": 1, "deadline_seconds": 0.25}, "job": 8388609, "decided": {"ends": [[8388609, "rejected", "deadline"]]}}
{"at": 1.5, "tick": {}}
{"at": 2, "finish": {"run": 1048577, "result": "completed", "seconds": 0.75}, "decided": {"ends": [[4194304, "completed", "none"]]}}
)");
}

TEST(PoolLedger, HasTenantsAndWhatIsForgotten) {
  const auto out = std::make_shared<std::ostringstream>();
  PoolState pool;
  (void)pool.add_kind({.name = "gone"});
  (void)pool.add_kind({.name = "here"});
  EXPECT_TRUE(pool.forget(0));
  const std::size_t a = pool.add_tenant({.name = "a", .weight = 2.0, .devices = 3, .memory_bytes = 5.0});
  pool.write_to(out);
  out->str("");
  (void)pool.add_tenant({.name = "b"});
  JobId job{};
  (void)pool.submit(0.0, {.kind = 1, .tenant = a, .charge = 2.5, .own = true, .waits = true}, job);
  EXPECT_TRUE(pool.forget(pool.add_kind({.name = "short"})));
  EXPECT_EQ(out->str(),
            R"({"add_tenant": {"name": "b"}}
{"at": 0, "submit": {"kind": 1, "tenant": 1, "charge": 2.5, "own": true, "waits": true}, "job": 4194304, "decided": {"ends": [[4194304, "rejected", "no_device"]]}}
{"add_kind": {"name": "short", "sizes": [1]}}
{"forget": {"kind": 0}}
)");
}

TEST(PoolLedger, HasModelsThatAreUnloaded) {
  const auto out = std::make_shared<std::ostringstream>();
  PoolState pool;
  (void)pool.add_kind({.name = "a", .model = "m \"1\"", .resident_bytes = 1.0});
  (void)pool.add_device(0.0, {.name = "d:0"});
  pool.write_to(out);
  JobId job{};
  const PoolDecisions made = pool.submit(0.0, {}, job);
  (void)pool.finish(1.0, made.starts.at(0).run, RunResult::completed, 1.0);
  out->str("");
  EXPECT_FALSE(pool.unload(0, "another one"));
  EXPECT_TRUE(pool.unload(0, "m \"1\""));
  EXPECT_EQ(out->str(), "{\"unload\": {\"device\": 0, \"model\": \"m \\\"1\\\"\"}}\n");
}

TEST(PoolLedger, SaysWhatTheUsersPlacementAnswered) {
  const auto out = std::make_shared<std::ostringstream>();
  PoolState pool({.placement = Placement::custom, .choose = [](const PoolQuestion& asked) {
                    return asked.now_seconds < 1.0 ? std::optional<std::size_t>() : 0;
                  }});
  pool.write_to(out);
  (void)pool.add_kind({.name = "a"});
  (void)pool.add_device(0.0, {.name = "d:0"});
  JobId job{};
  (void)pool.submit(0.5, {}, job);
  (void)pool.tick(1.5);
  EXPECT_NE(out->str().find(R"("chosen": [null], "decided": {"declines": [[0, 0, "chosen_otherwise", 1, 0]])"),
            std::string::npos)
      << out->str();
  EXPECT_NE(out->str().find(R"("tick": {}, "chosen": [0], "decided": {"starts": )"), std::string::npos) << out->str();
}

TEST(PoolLedger, BeginsBeforeTheFirstDecision) {
  PoolState pool;
  (void)pool.add_kind({.name = "a"});
  (void)pool.add_device(0.0, {.name = "d:0"});
  EXPECT_FALSE(pool.begun());
  JobId job{};
  (void)pool.submit(0.0, {}, job);
  EXPECT_TRUE(pool.begun());
  EXPECT_THROW(pool.write_to(std::make_shared<std::ostringstream>()), InvalidArgument);
}

TEST(PoolLedger, EndsWithTheFirstLineThatCannotBeWritten) {
  const auto out = std::make_shared<std::ostringstream>();
  PoolState pool;
  pool.write_to(out);
  const std::string header = out->str();
  out->setstate(std::ios::badbit);
  (void)pool.add_kind({.name = "a"});
  EXPECT_TRUE(pool.ledger_failed());
  out->clear();
  (void)pool.add_kind({.name = "b"});
  EXPECT_EQ(out->str(), header);
}

}  // namespace
}  // namespace paceline::plan
