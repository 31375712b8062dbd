// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/plan/cost_model.hpp>

#include "balance/auto_policy.hpp"
#include "balance/estimator.hpp"
#include "balance/lent_time.hpp"
#include "balance/policy.hpp"
#include "balance/reduction_cost.hpp"
#include "balance/size_history.hpp"
#include "balance/startup_cost.hpp"

namespace paceline::balance {

/// Everything a balancer remembers.
struct Balancer::State {
  struct Incumbent {
    std::vector<std::int64_t> shares;   // in force
    std::vector<std::int64_t> planned;  // of the last step; others than `shares` if that step was planned to learn from
    std::int64_t last_used = 0;
  };

  explicit State(BalancerOptions given);

  [[nodiscard]] PolicyContext context(std::int64_t batch_size) const;
  /// The options' limits, and the least items where those are more, for a batch of this size.
  void fit_limits(std::int64_t batch_size);
  [[nodiscard]] bool respects_limits(const std::vector<std::int64_t>& shares) const;
  [[nodiscard]] Proposal propose(std::int64_t batch_size);
  [[nodiscard]] StepPlan make_plan(std::int64_t batch_size);
  void devices_changed();
  [[nodiscard]] double possible_gain() const;
  [[nodiscard]] double slowdown_of(std::size_t device) const;
  /// What recent steps of several devices took over what was predicted of them, at least 1: devices do not end at the
  /// same moment. One device alone waits for none.
  [[nodiscard]] double waiting() const;

  BalancerOptions options;
  std::vector<plan::ShareLimits> limits;  // the options' own with the measured start-up, maximum 0 once retired
  std::int64_t least_items = 1;
  std::vector<bool> retired;
  Estimator estimator;
  ReductionCost reduction;
  StartupCost startup;
  LentTime lent;
  SizeHistory sizes;
  std::vector<std::optional<plan::CostModel>> hinted;  // what an earlier run measured of the devices; empty: nothing
  std::vector<plan::CostModel> hints;                  // the same, with a guess for devices that it lacks
  std::vector<double> ratios;                          // of shares that do not follow from measurements
  std::optional<AutoPolicy> automatic;                 // otherwise
  std::map<std::int64_t, Incumbent> incumbents;        // by batch size
  std::optional<StepPlan> plan;                        // the last one
  std::optional<StepPlan> usual;          // the last one of the batch size that most steps have: what is shown
  std::vector<std::int64_t> batch_sizes;  // of recent plans: oldest first
  bool awaiting_record = false;
  bool called = false;
  std::vector<double> waits;  // of `waiting`: oldest first
  std::int64_t step = 0;
  std::int64_t moves = 0;
  std::shared_ptr<LedgerWriter> ledger;
};

}  // namespace paceline::balance
