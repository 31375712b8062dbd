// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/ledger.hpp>

#include <gtest/gtest.h>

#include <sstream>
#include <streambuf>

#include <paceline/error.hpp>
#include <paceline/sim/simulate.hpp>

namespace paceline::balance {
namespace {

/// The ledger of 300 noisy steps with a throttle, spikes and a failure.
std::string eventful_ledger(const std::string& policy = "auto") {
  sim::SimulationOptions options;
  for (int i = 0; i < 4; ++i) {
    sim::SimDevice device;
    device.name = "sim \"" + std::to_string(i) + "\"\n";
    device.speed = i == 3 ? 0.5 : 1.0;
    device.limits.maximum = i == 0 ? 300 : plan::ShareLimits::kUnlimited;
    options.box.devices.push_back(device);
  }
  options.box.noise = 0.03;
  options.box.spike_probability = 0.01;
  options.box.spike_factor = 1.7;
  options.box.throttles = {{0, 2.0, 100, 200}};
  options.box.failures = {{2, 250}};
  options.box.seed = 5;
  options.steps = 300;
  options.policy = policy;
  std::ostringstream out;
  options.ledger = std::make_shared<LedgerWriter>(out);
  sim::simulate(options);
  return out.str();
}

/// Takes so many bytes, then none.
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

ReplayResult replay_text(const std::string& text) {
  std::istringstream in(text);
  return replay(in);
}

std::string error_of(const std::string& text) {
  try {
    replay_text(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

std::string first_lines(const std::string& text, int count) {
  std::size_t at = 0;
  for (int k = 0; k < count; ++k) at = text.find('\n', at) + 1;
  return text.substr(0, at);
}

TEST(Ledger, ReplaysToTheSameDecisions) {
  for (const char* policy : {"auto", "even", "weighted"}) {
    const ReplayResult result = replay_text(eventful_ledger(policy));
    EXPECT_EQ(result.plans, 301) << policy << ": one step failed and was planned twice";
    EXPECT_EQ(result.records, 300);
    EXPECT_TRUE(result.mismatches.empty()) << result.mismatches.front().what;
    EXPECT_GT(result.moves, std::string(policy) == "auto" ? 2 : -1);
  }
}

TEST(Ledger, ReplaysWhatDependsOnReductionsAndStarts) {
  std::ostringstream out;
  BalancerOptions options;
  options.devices = {{"a", "host", {}}, {"b", "host", {}}, {"c", "host", {}}};
  Balancer balancer(options);
  balancer.write_to(std::make_shared<LedgerWriter>(out));
  for (int k = 0; k < 40; ++k) {
    const StepPlan plan = balancer.next_plan(90);
    StepTimings timings;
    timings.reduction_seconds = 0.01;
    timings.startup_seconds = {0.0, 0.02, std::nullopt};
    for (const std::int64_t share : plan.shares) {
      auto& runs = timings.devices.emplace_back();
      if (share > 0) runs.push_back({share, 0.001 * static_cast<double>(share)});
    }
    if (plan.shares[2] > 0) timings.startup_seconds[2] = 0.0125;
    balancer.record(timings);
  }
  EXPECT_GT(balancer.move_count(), 0);
  const ReplayResult result = replay_text(out.str());
  EXPECT_EQ(result.records, 40);
  EXPECT_TRUE(result.mismatches.empty()) << result.mismatches.front().what;
}

TEST(Ledger, IsWrittenTheSameTwice) { EXPECT_EQ(eventful_ledger(), eventful_ledger()); }

TEST(Ledger, HoldsWhatRanBesideTheDecisionsAndReplaysWithoutIt) {
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
  EXPECT_NE(out.str().find(R"({"claims": {"step": 0, "batch_size": 8, "ran": [[0, 0, 4, 0, 0.5], )"
                           R"([1, 4, 8, 0.125, 0.375]]}})"),
            std::string::npos)
      << out.str();
  EXPECT_NE(out.str().find(R"(]], "pieces": [[0, 0, 2], [0, 2, 4], [1, 4, 8]]}})"), std::string::npos) << out.str();
  EXPECT_NE(out.str().find(R"(]], "order": [7, 0, 3, 1, 2, 6, 5, 4]}})"), std::string::npos) << out.str();
  std::istringstream in(out.str());
  const ReplayResult result = replay(in);
  EXPECT_TRUE(result.mismatches.empty());
  EXPECT_EQ(result.records, 1);
}

TEST(Ledger, DetectsAChangedPlan) {
  std::string text = eventful_ledger();
  const std::size_t at = text.find("\"shares\": [", text.find("\"plan\": {\"step\": 150")) + 11;
  text[at] = text[at] == '1' ? '2' : '1';
  const ReplayResult result = replay_text(text);
  ASSERT_EQ(result.mismatches.size(), 1u);
  EXPECT_EQ(result.mismatches[0].step, 150);
  EXPECT_NE(result.mismatches[0].what.find("shares"), std::string::npos);
  EXPECT_EQ(result.mismatches[0].line, 302);
}

TEST(Ledger, DetectsAChangedTiming) {
  std::string text = eventful_ledger();
  // The first step's first device: what was learned from it changes every prediction after it.
  const std::size_t at = text.find("\"devices\": [[[", text.find("\"record\"")) + 14;
  const std::size_t seconds = text.find("0.0", at) + 3;
  text[seconds] = text[seconds] == '5' ? '6' : '5';
  EXPECT_FALSE(replay_text(text).mismatches.empty());
}

TEST(Ledger, DetectsALostRecord) {
  std::string text = eventful_ledger();
  const std::size_t start = text.find("{\"record\": {\"step\": 20,");
  text.erase(start, text.find('\n', start) + 1 - start);
  EXPECT_NE(error_of(text).find("a record of step 21 after the plan of step 20"), std::string::npos) << error_of(text);
}

TEST(Ledger, NamesTheLineThatIsWrong) {
  const std::string good = first_lines(eventful_ledger(), 3);
  EXPECT_EQ(replay_text(good).plans, 1);
  EXPECT_NE(error_of("").find("line 1"), std::string::npos);
  EXPECT_NE(error_of("{}\n").find("\"paceline_ledger\" is missing"), std::string::npos);
  EXPECT_NE(error_of("{\"paceline_ledger\": 99}\n").find("version 99"), std::string::npos);
  const auto after_good = [&](const std::string& line) { return error_of(good + line + "\n"); };
  for (const auto& [line, what] : std::vector<std::pair<std::string, std::string>>{
           {"{\"plan\": {\"step\": 1}}", "\"batch_size\" is missing"},
           {"{\"plan\": {\"step\": 1, \"batch_size\": \"x\"}}", "a number expected, a string is there"},
           {"{\"plan\": {\"step\": 1, \"batch_size\": 1.5}}", "1.5 is not a whole number"},
           {"{\"plan\": ", "column 10"},
           {"{\"plan\": 01}", "leading zero"},
           {"{\"a\": 1, \"a\": 2}", "twice"},
           {"[1, 2", "column 6"},
           {"nul", "a value expected"},
           {"{} x", "nothing may follow"},
           {"", "a value expected"},
           {"{\"weather\": 1}", "neither"},
           {"{\"retire\": {\"device\": 17}}", "no device 17"},
           {std::string(40, '['), "too deeply"},
       }) {
    const std::string message = after_good(line);
    EXPECT_NE(message.find("line 4"), std::string::npos) << message;
    EXPECT_NE(message.find(what), std::string::npos) << message;
  }
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
  EXPECT_NE(balancer.explain().find("The ledger could not be written to its end"), std::string::npos);
  out.clear();  // space again: a line that is missing in the middle would not replay
  step();
  EXPECT_EQ(disk.written().size(), 1000U);
}

}  // namespace
}  // namespace paceline::balance
