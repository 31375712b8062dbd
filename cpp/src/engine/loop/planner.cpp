// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/planner.hpp"

#include <vector>

#include <paceline/per_device.hpp>

namespace paceline::internal {

balance::StepPlan Planner::decide(std::int64_t batch_size, const std::shared_ptr<balance::LedgerWriter>& whole_ledger) {
  if (whole_ledger != nullptr && ledger == nullptr) {
    ledger = std::make_shared<balance::LedgerWriter>(*whole_ledger);
    balancer.write_to(ledger);
  }
  draw(batch_size);
  balance::StepPlan plan = latest;
  if (std::exchange(begun, plan.step) == plan.step) plan.moved = false;  // the same plan again; a move counts once
  return plan;
}

void Planner::draw(std::int64_t batch_size) {
  latest = balancer.next_plan(batch_size);
  awaits_record = true;
}

void Planner::record(const BatchPlan& plan, const StepRecord& record, std::span<const MicroBatch> pieces) {
  // Steps that began before the times of an earlier step were known may have run by an older plan. If a move came in
  // the meantime, only steps that ran by its shares judge it. The balancer's plan stays until one of them is
  // recorded.
  if (!awaits_record) draw(plan.balance.batch_size);
  if (latest.shares == plan.balance.shares) {
    balancer.record(plan.timings(record));
    awaits_record = false;
  }
  if (ledger == nullptr) return;
  const auto place = [&](DeviceId id) { return internal::place_of(plan.devices, id); };
  std::vector<balance::LedgerClaim> claims;
  for (const ClaimRecord& claim : record.claims) {
    const MicroBatch& mb = claim.micro_batch;
    claims.push_back({place(mb.device), mb.begin, mb.end, claim.start_seconds, claim.finish_seconds});
  }
  std::vector<balance::LedgerClaim> cut;
  for (const MicroBatch& piece : pieces) cut.push_back({place(piece.device), piece.begin, piece.end});
  ledger->claims(plan.balance.step, plan.size, claims, cut, plan.arrangement.order);
}

void Planner::forget() {
  latest = {};
  begun = -1;
  awaits_record = false;
}

}  // namespace paceline::internal
