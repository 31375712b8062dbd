// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/stage_balancer.hpp>
#include <paceline/plan/stages.hpp>

#include "balance/stage_knowledge.hpp"

namespace paceline::balance {

/// A problem of the devices that are not retired, and their numbers among all.
struct ActiveProblem {
  plan::StageProblem problem;
  std::vector<std::size_t> devices;  ///< the number among all of each device of `problem`

  /// The number in `problem` of a device; one beyond the last if it is retired.
  [[nodiscard]] std::size_t local(std::size_t device) const;
  [[nodiscard]] std::vector<std::size_t> local(std::span<const std::size_t> order) const;
};

/// What plans keep to, so that memory does not run out.
struct MemoryLimits {
  std::vector<std::int64_t> caps;  ///< bytes per device
  std::int64_t most_in_flight = 0;
};

// A step that runs out of memory runs twice. After 64 steps that is at most 1.6 %, and each try in vain doubles them.
constexpr std::int64_t kTryMemoryAfter = 64;

struct StageBalancer::State {
  State(plan::StageProblem given, plan::StageOptions wanted, MoveCost price);

  /// A plan of one batch size, and when it was used.
  struct Planned {
    plan::StagePlan plan;
    std::int64_t last_used = 0;
  };
  /// What a change promises.
  struct Promise {
    plan::StagePlan plan;
    double gain = 0.0;      // seconds a step
    double required = 0.0;  // the least gain that is a reason
    double errors = 0.0;    // two standard errors of the gain
  };

  plan::StageProblem given;  // caps change
  plan::StageOptions options;
  MoveCost cost;
  StageKnowledge knowledge;
  std::vector<bool> retired;
  std::vector<std::int64_t> caps;         // memory that may be used, per device
  std::int64_t most_in_flight = 0;        // as given; that of the options is lower after memory ran out
  std::vector<std::size_t> cuts, order;   // of the present stages; empty: none
  std::map<std::int64_t, Planned> plans;  // per batch size, of the present stages
  std::int64_t batch_size = 0;            // of the last plan; 0: none
  std::vector<std::int64_t> batch_sizes;  // of recent plans: oldest first
  std::int64_t least_items = 1;           // of a micro-batch
  bool awaiting_record = false;
  bool stages_invalid = true;  // devices or memory changed: plan anew
  StageMove::Kind why_invalid = StageMove::Kind::devices;
  std::int64_t try_at = 0;                   // the step that tries again what did not fit in memory; 0: all did
  std::int64_t try_after = kTryMemoryAfter;  // steps; twice as many after each try in vain
  std::optional<MemoryLimits> proven;        // what fitted, while more is tried again
  std::int64_t step = 0;
  std::int64_t moves = 0;         // of cuts or devices
  std::int64_t changes = 0;       // of anything
  double regret = 0.0;            // summed since the last move
  std::optional<Promise> better;  // other cuts, as far as is known
  std::int64_t next_look = 0;
  std::int64_t last_news = 0;           // when something was learnt
  std::vector<plan::StageDevice> seen;  // devices at the last look
  std::vector<StageMove> recent;
  plan::StageProblem reasons;  // what was known at the last change

  [[nodiscard]] ActiveProblem active(std::int64_t items) const;
  /// With what the user fixed, for the devices that are left.
  [[nodiscard]] plan::StageOptions wanted(const ActiveProblem& problem) const;
  /// The same, with the present stages.
  [[nodiscard]] plan::StageOptions fixed(const ActiveProblem& problem) const;
  [[nodiscard]] plan::StagePlan search(const ActiveProblem& problem, plan::StageOptions with) const;
  [[nodiscard]] plan::StagePlan evaluate(const ActiveProblem& problem, const plan::StagePlan& plan) const;
  [[nodiscard]] Promise promise(const ActiveProblem& problem, const plan::StagePlan& now, plan::StagePlan other) const;

  bool out_of_memory(std::size_t stage);
  /// Plan with all memory again, if it ran out long enough ago.
  void try_memory_again();
  [[nodiscard]] MemoryLimits limits() const { return {caps, options.most_in_flight}; }
  void limit(const MemoryLimits& to);

  void plan_anew(const ActiveProblem& problem);
  void reconsider(const ActiveProblem& problem);
  void look(const ActiveProblem& problem);
  [[nodiscard]] bool is_news(const plan::StageProblem& problem) const;
  [[nodiscard]] std::string reason(StageMove::Kind kind) const;
  [[nodiscard]] double price(std::int64_t bytes) const;
  void adopt(const plan::StagePlan& next, StageMove::Kind kind, double before, std::int64_t bytes);
  [[nodiscard]] const plan::StagePlan& current() const { return plans.at(batch_size).plan; }
};

}  // namespace paceline::balance
