// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <paceline/balance/balancer.hpp>
#include <paceline/balance/ledger.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/step.hpp>

namespace paceline::internal {

/// The balancer of one kind of batch, and its part of the ledger.
struct Planner {
  explicit Planner(balance::Balancer made) : balancer(std::move(made)) {}

  balance::StepPlan decide(std::int64_t batch_size, const std::shared_ptr<balance::LedgerWriter>& whole_ledger);
  void draw(std::int64_t batch_size);
  /// Learns from a committed step that ran by `plan`, in these pieces (see StepPieces::ran).
  void record(const BatchPlan& plan, const StepRecord& record, std::span<const MicroBatch> pieces);
  /// Earlier plans are void.
  void forget();

  balance::Balancer balancer;
  std::shared_ptr<balance::LedgerWriter> ledger;
  balance::StepPlan latest;    // running steps may have an older plan
  bool awaits_record = false;  // no step that ran by `latest` has been recorded yet
  std::int64_t begun = -1;     // the number of the plan that the last batch got
};

}  // namespace paceline::internal
