// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/ledger.hpp>

#include <gtest/gtest.h>

#include <optional>
#include <sstream>
#include <streambuf>

#include <paceline/error.hpp>

#include "errors.hpp"

namespace paceline::balance {
namespace {

/// Accepts so many bytes, then refuses.
class FullDisk final : public std::streambuf {
 public:
  explicit FullDisk(std::size_t space) : space_(space) {}
  [[nodiscard]] const std::string& written() const { return written_; }

 protected:
  int_type overflow(int_type c) override {
    if (written_.size() == space_) return traits_type::eof();
    written_.push_back(traits_type::to_char_type(c));
    return c;
  }

 private:
  std::size_t space_;
  std::string written_;
};

TEST(Ledger, HasALineForEachCall) {
  std::ostringstream out;
  Balancer balancer({.devices = {{"a \"0\"\\\n\x1fé", "host", {.minimum = 2, .startup_seconds = 0.1}},
                                 {"b", "other", {.maximum = 6, .may_be_zero = false}}},
                     .policy = Balance::weighted,
                     .weights = {3, 1},
                     .granularity = 2,
                     .reduction_seconds = {0, 0, 1e-05},
                     .calibrate = false,
                     .proportional = true,
                     .unit = "units of work"});
  balancer.write_to(std::make_shared<LedgerWriter>(out));
  balancer.set_least_items(2);
  balancer.next_plan(8);
  balancer.record({.devices = {{{4, 0.1}, {2, 1.0 / 3.0, true}}, {}},
                   .step_seconds = 0.5,
                   .reduction_seconds = 0.25,
                   .startup_seconds = {0.0, std::nullopt}});
  balancer.retire(1);
  EXPECT_EQ(
      out.str(),
      R"({"paceline_ledger": 7, "options": {"policy": "weighted", "weights": [3, 1], "granularity": 2, )"
      R"("reduction_seconds": [0, 0, 1e-05], "calibrate": false, "proportional": true, )"
      R"("unit": "units of work", "devices": [)"
      R"({"name": "a \"0\"\\\u000a\u001fé", "device_class": "host", "minimum": 2, "maximum": null, )"
      R"("may_be_zero": true, "startup_seconds": 0.1}, {"name": "b", "device_class": "other", "minimum": 0, )"
      R"("maximum": 6, "may_be_zero": false, "startup_seconds": 0}]}})"
      "\n"
      R"({"least_items": 2})"
      "\n"
      R"({"plan": {"step": 0, "batch_size": 8, "shares": [6, 2], "moved": false, "predicted_seconds": 0, )"
      R"("reason": "by the given ratios"}})"
      "\n"
      R"({"record": {"step": 0, "devices": [[[4, 0.1], [2, 0.3333333333333333, true]], []], "step_seconds": 0.5, )"
      R"("reduction_seconds": 0.25, "startup_seconds": [0, null]}})"
      "\n"
      R"({"retire": {"device": 1}})"
      "\n");
}

TEST(Ledger, HoldsWhatRanBesideTheDecisions) {
  std::ostringstream out;
  const auto ledger = std::make_shared<LedgerWriter>(out);
  BalancerOptions options;
  options.devices = {{"a", "host", {}}, {"b", "host", {}}};
  Balancer balancer(options);
  balancer.write_to(ledger);
  const StepPlan plan = balancer.next_plan(8);
  balancer.record({.devices = {{{4, 0.5}}, {{4, 0.25}}}, .step_seconds = 0.5});
  const std::vector<LedgerClaim> ran = {{0, 0, 4, 0.0, 0.5}, {1, 4, 8, 0.125, 0.375}};
  const std::vector<LedgerClaim> pieces = {{0, 0, 2}, {0, 2, 4}, {1, 4, 8}};
  ledger->claims(plan.step, plan.batch_size, ran, {});
  ledger->claims(plan.step, plan.batch_size, ran, pieces);
  ledger->claims(plan.step, plan.batch_size, ran, {}, std::vector<std::int64_t>{7, 0, 3, 1, 2, 6, 5, 4});
  EXPECT_TRUE(says(out.str(), R"({"claims": {"step": 0, "batch_size": 8, "ran": [[0, 0, 4, 0, 0.5], )"
                              R"([1, 4, 8, 0.125, 0.375]]}})"));
  EXPECT_TRUE(says(out.str(), R"(]], "pieces": [[0, 0, 2], [0, 2, 4], [1, 4, 8]]}})"));
  EXPECT_TRUE(says(out.str(), R"(]], "order": [7, 0, 3, 1, 2, 6, 5, 4]}})"));
}

TEST(Ledger, MustBeAttachedBeforeTheFirstCall) {
  BalancerOptions options;
  options.devices = {{"host:0", "host", {}}};
  Balancer balancer(options);
  balancer.next_plan(8);
  std::ostringstream out;
  EXPECT_THROW(balancer.write_to(std::make_shared<LedgerWriter>(out)), InvalidArgument);
}

TEST(Ledger, SaysThatItCouldNotBeWrittenToItsEnd) {
  FullDisk disk(1000);
  std::ostream out(&disk);
  const auto ledger = std::make_shared<LedgerWriter>(out);
  BalancerOptions options;
  options.devices = {{"host:0", "host", {}}, {"host:1", "host", {}}};
  Balancer balancer(options);
  balancer.write_to(ledger);
  const auto step = [&] {
    const StepPlan plan = balancer.next_plan(64);
    balancer.record({.devices = {{{plan.shares[0], 0.01}}, {{plan.shares[1], 0.01}}}, .step_seconds = 0.01});
  };
  step();
  EXPECT_FALSE(ledger->failed());
  EXPECT_EQ(balancer.explain().find("ledger"), std::string::npos);
  for (int k = 0; k < 10; ++k) step();
  EXPECT_TRUE(ledger->failed());
  EXPECT_TRUE(says(balancer.explain(), "The ledger could not be written to its end"));
  out.clear();  // there is space again, but a ledger with a missing line would not replay
  step();
  EXPECT_EQ(disk.written().size(), 1000U);
}

}  // namespace
}  // namespace paceline::balance
