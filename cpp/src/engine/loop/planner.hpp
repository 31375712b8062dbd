// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/runtime/device_group.hpp>

#include "engine/loop/item_work.hpp"

namespace paceline::internal {

/// Plans batches, with costs or without, and learns from the steps that ran by these plans.
///
/// Without costs a balancer splits items, with costs it splits work. The times of the two cannot be compared, so each
/// kind of batch has a balancer of its own. Steps of both kinds may alternate.
class Planner {
 public:
  Planner(const DeviceGroup& group, const StepLoopOptions& options);

  /// Whether the next plan for such a batch would be the last plan again, unless another step is recorded first.
  [[nodiscard]] bool plans_again(std::int64_t batch_size, std::int64_t least_items) const;
  [[nodiscard]] bool plans_again(std::span<const double> costs) const;
  /// `least_items`: the fewest items of a micro-batch, unless the batch has fewer.
  [[nodiscard]] std::shared_ptr<BatchPlan> next(std::int64_t batch_size, std::int64_t least_items);
  /// Requires: check_costs().
  [[nodiscard]] std::shared_ptr<BatchPlan> next(std::span<const double> costs, std::int64_t least_items);
  /// Learns from a committed step that ran by `plan`, in these pieces (see StepPieces::ran).
  void record(const BatchPlan& plan, const StepRecord& record, std::span<const MicroBatch> pieces);

  /// Applies `change` to both balancers between steps. Earlier plans are void.
  void change_devices(const std::function<void(balance::Balancer&)>& change);

  /// From now on the ledger gets the calls of both balancers, each from its first plan on. Null: no ledger.
  void write_to(std::shared_ptr<balance::LedgerWriter> ledger);
  [[nodiscard]] bool writes_ledger() const noexcept { return ledger_ != nullptr; }
  /// Whether a batch of either kind was ever planned.
  [[nodiscard]] bool has_planned() const noexcept { return alike_.balancer.called() || by_cost_.balancer.called(); }

  /// The balancer of the last plan.
  [[nodiscard]] balance::Balancer& balancer() noexcept { return last_->balancer; }
  [[nodiscard]] const balance::Balancer& balancer() const noexcept { return last_->balancer; }
  [[nodiscard]] bool by_cost() const noexcept { return last_ == &by_cost_; }
  /// What items cost in time. None before the first batch with costs.
  [[nodiscard]] std::optional<ItemReport> item_report() const;
  [[nodiscard]] std::string explain(std::span<const std::string> causes) const;

 private:
  struct Kind {
    balance::Balancer balancer;
    std::shared_ptr<balance::LedgerWriter> ledger{};  // this balancer's part of it
    balance::StepPlan latest{};                       // the balancer's; running steps may have an older plan
    bool awaits_record = false;                       // no step that ran by `latest` has been recorded yet
    std::int64_t begun = -1;                          // the number of the plan that the last batch got
  };

  [[nodiscard]] balance::StepPlan decide(Kind& kind, std::int64_t batch_size);
  static void draw(Kind& kind, std::int64_t batch_size);

  Kind alike_;    // batches without costs
  Kind by_cost_;  // batches with costs, in units of work
  ItemWork work_;
  Kind* last_ = &alike_;
  std::shared_ptr<balance::LedgerWriter> ledger_;
};

}  // namespace paceline::internal
