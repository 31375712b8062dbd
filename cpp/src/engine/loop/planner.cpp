// SPDX-License-Identifier: Apache-2.0
#include "engine/loop/planner.hpp"

#include <utility>
#include <vector>

#include "engine/loop/step_loop_options.hpp"

namespace paceline::internal {
namespace {

std::vector<std::string> classes_of(const DeviceGroup& group) {
  std::vector<std::string> classes;
  for (const Device& device : group.devices()) classes.push_back(device.device_class);
  return classes;
}

std::vector<balance::LedgerClaim> ledger_claims(const std::vector<ClaimRecord>& claims) {
  std::vector<balance::LedgerClaim> out;
  out.reserve(claims.size());
  for (const ClaimRecord& claim : claims) {
    const MicroBatch& mb = claim.micro_batch;
    out.push_back({mb.device, mb.begin, mb.end, claim.start_seconds, claim.finish_seconds});
  }
  return out;
}

std::vector<balance::LedgerClaim> ledger_claims(std::span<const MicroBatch> pieces) {
  std::vector<balance::LedgerClaim> out;
  out.reserve(pieces.size());
  for (const MicroBatch& piece : pieces) out.push_back({piece.device, piece.begin, piece.end});
  return out;
}

}  // namespace

Planner::Planner(const DeviceGroup& group, const StepLoopOptions& options)
    : alike_{.balancer = make_balancer(group, options, false)},
      by_cost_{.balancer = make_balancer(group, options, true)},
      work_(classes_of(group), options.micro_batch, options.balance != Balance::automatic) {}

bool Planner::plans_again(std::int64_t batch_size, std::int64_t least_items) const {
  return alike_.latest.batch_size == batch_size && alike_.balancer.least_items() == least_items;
}

bool Planner::plans_again(std::span<const double> costs) const {
  return by_cost_.latest.batch_size == work_.batch_units(costs);
}

std::shared_ptr<BatchPlan> Planner::next(std::int64_t batch_size, std::int64_t least_items) {
  alike_.balancer.set_least_items(least_items);
  auto made = std::make_shared<BatchPlan>();
  made->size = batch_size;
  made->balance = decide(alike_, batch_size);
  made->shares = made->balance.shares;
  return made;
}

std::shared_ptr<BatchPlan> Planner::next(std::span<const double> costs, std::int64_t least_items) {
  return work_.arrange(costs, decide(by_cost_, work_.begin(costs)), least_items);
}

balance::StepPlan Planner::decide(Kind& kind, std::int64_t batch_size) {
  if (ledger_ != nullptr && kind.ledger == nullptr) {
    kind.ledger = std::make_shared<balance::LedgerWriter>(*ledger_);
    kind.balancer.write_to(kind.ledger);
  }
  last_ = &kind;
  draw(kind, batch_size);
  balance::StepPlan plan = kind.latest;
  if (std::exchange(kind.begun, plan.step) == plan.step) plan.moved = false;  // the same plan again; a move counts once
  return plan;
}

void Planner::draw(Kind& kind, std::int64_t batch_size) {
  kind.latest = kind.balancer.next_plan(batch_size);
  kind.awaits_record = true;
}

void Planner::record(const BatchPlan& plan, const StepRecord& record, std::span<const MicroBatch> pieces) {
  Kind& kind = plan.by_cost() ? by_cost_ : alike_;
  // Steps that began before the times of an earlier step were known may have run by an older plan. If a move came in
  // the meantime, only steps that ran by its shares judge it. The balancer's plan stays until one of them is recorded.
  if (!kind.awaits_record) draw(kind, plan.balance.batch_size);
  if (kind.latest.shares == plan.balance.shares) {
    kind.balancer.record(plan.timings(record));
    kind.awaits_record = false;
  }
  if (kind.ledger != nullptr) {
    kind.ledger->claims(plan.balance.step, plan.size, ledger_claims(record.claims), ledger_claims(pieces),
                        plan.arrangement.order);
  }
  if (plan.by_cost()) work_.record(plan, record, kind.balancer);
}

void Planner::change_devices(const std::function<void(balance::Balancer&)>& change) {
  for (Kind* const kind : {&alike_, &by_cost_}) {
    change(kind->balancer);
    kind->latest = {};
    kind->begun = -1;
    kind->awaits_record = false;
  }
}

void Planner::write_to(std::shared_ptr<balance::LedgerWriter> ledger) {
  ledger_ = std::move(ledger);
  for (Kind* const kind : {&alike_, &by_cost_}) {
    kind->balancer.write_to(nullptr);
    kind->ledger = nullptr;
  }
}

std::optional<ItemReport> Planner::item_report() const {
  if (!by_cost_.balancer.called()) return std::nullopt;
  return work_.report();
}

std::string Planner::explain(std::span<const std::string> causes) const {
  const std::string text = last_->balancer.explain(causes);
  if (!by_cost()) return text;
  return "Items are dealt by cost: batch, shares and items below are work, of which the first batch had 1000000.\n" +
         text + work_.explain();
}

}  // namespace paceline::internal
