// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/ledger.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ostream>

#include "json.hpp"

namespace paceline::balance {
namespace {

std::string limits_json(const plan::ShareLimits& limits) {
  const bool unlimited = limits.maximum == plan::ShareLimits::kUnlimited;
  return fmt::format(R"("minimum": {}, "maximum": {}, "may_be_zero": {}, "startup_seconds": {})", limits.minimum,
                     unlimited ? "null" : fmt::to_string(limits.maximum), limits.may_be_zero, limits.startup_seconds);
}

}  // namespace

LedgerWriter::LedgerWriter(std::ostream& out) : sink_(std::make_shared<Sink>(Sink{.out = &out})) {}

// Flushed: a program that crashes is the one whose decisions somebody wants to see.
void LedgerWriter::line(const std::string& members) {
  if (sink_->failed) return;
  const std::string balancer = balancer_ > 0 ? fmt::format(R"("balancer": {}, )", balancer_) : "";
  *sink_->out << '{' << balancer << members << "}\n" << std::flush;
  sink_->failed = !*sink_->out;
}

void LedgerWriter::header(const BalancerOptions& options) {
  balancer_ = sink_->balancers++;
  std::vector<std::string> devices;
  for (const DeviceProfile& device : options.devices) {
    devices.push_back(fmt::format(R"({{"name": {}, "device_class": {}, {}}})", json_quoted(device.name),
                                  json_quoted(device.device_class), limits_json(device.limits)));
  }
  const std::string unit = options.unit == "items" ? "" : fmt::format(R"(, "unit": {})", json_quoted(options.unit));
  line(fmt::format(R"("paceline_ledger": {}, "options": {{"policy": {}, "weights": [{}], "granularity": {}, )"
                   R"("reduction_seconds": [{}], "calibrate": {}, "proportional": {}{}, "devices": [{}]}})",
                   kLedgerVersion, json_quoted(name_of(options.policy)), fmt::join(options.weights, ", "),
                   options.granularity, fmt::join(options.reduction_seconds, ", "), options.calibrate,
                   options.proportional, unit, fmt::join(devices, ", ")));
}

void LedgerWriter::plan(const StepPlan& plan) {
  line(fmt::format(R"("plan": {{"step": {}, "batch_size": {}, "shares": [{}], "moved": {}, "predicted_seconds": {}, )"
                   R"("reason": {}}})",
                   plan.step, plan.batch_size, fmt::join(plan.shares, ", "), plan.moved, plan.predicted_seconds,
                   json_quoted(plan.reason)));
}

void LedgerWriter::record(std::int64_t step, const StepTimings& timings) {
  std::vector<std::string> devices;
  for (const auto& device : timings.devices) {
    std::vector<std::string> runs;
    for (const MicroBatchTiming& timing : device) {
      runs.push_back(fmt::format("[{}, {}{}]", timing.items, timing.seconds, timing.excluded ? ", true" : ""));
    }
    devices.push_back(fmt::format("[{}]", fmt::join(runs, ", ")));
  }
  const std::string reduction =
      timings.reduction_seconds > 0.0 ? fmt::format(R"(, "reduction_seconds": {})", timings.reduction_seconds) : "";
  std::vector<std::string> starts;
  for (const std::optional<double>& seconds : timings.startup_seconds) {
    starts.push_back(seconds ? fmt::to_string(*seconds) : "null");
  }
  const std::string startup =
      starts.empty() ? "" : fmt::format(R"(, "startup_seconds": [{}])", fmt::join(starts, ", "));
  const std::string lent =
      timings.lent_parts.empty() ? "" : fmt::format(R"(, "lent_parts": [{}])", fmt::join(timings.lent_parts, ", "));
  line(fmt::format(R"("record": {{"step": {}, "devices": [{}], "step_seconds": {}{}{}{}}})", step,
                   fmt::join(devices, ", "), timings.step_seconds, reduction, startup, lent));
}

void LedgerWriter::claims(std::int64_t step, std::int64_t batch_size, std::span<const LedgerClaim> ran,
                          std::span<const LedgerClaim> pieces, std::span<const std::int64_t> order) {
  std::vector<std::string> runs;
  for (const LedgerClaim& claim : ran) {
    runs.push_back(fmt::format("[{}, {}, {}, {}, {}]", claim.device, claim.begin, claim.end, claim.start_seconds,
                               claim.finish_seconds));
  }
  std::vector<std::string> parts;
  for (const LedgerClaim& piece : pieces) {
    parts.push_back(fmt::format("[{}, {}, {}]", piece.device, piece.begin, piece.end));
  }
  line(fmt::format(R"("claims": {{"step": {}, "batch_size": {}, "ran": [{}]{}{}}})", step, batch_size,
                   fmt::join(runs, ", "),
                   parts.empty() ? "" : fmt::format(R"(, "pieces": [{}])", fmt::join(parts, ", ")),
                   order.empty() ? "" : fmt::format(R"(, "order": [{}])", fmt::join(order, ", "))));
}

void LedgerWriter::least_items(std::int64_t items) { line(fmt::format(R"("least_items": {})", items)); }

void LedgerWriter::hint(std::span<const std::optional<plan::CostModel>> models) {
  std::vector<std::string> devices;
  for (const std::optional<plan::CostModel>& model : models) {
    devices.push_back(model ? fmt::format("[{}, {}]", model->fixed_seconds(), model->per_item_seconds()) : "null");
  }
  line(fmt::format(R"("hint": [{}])", fmt::join(devices, ", ")));
}

void LedgerWriter::retire(std::size_t device) { line(fmt::format(R"("retire": {{"device": {}}})", device)); }
void LedgerWriter::restore(std::size_t device) { line(fmt::format(R"("restore": {{"device": {}}})", device)); }

}  // namespace paceline::balance
