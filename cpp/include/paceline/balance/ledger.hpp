// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balancer.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::balance {

/// Raised when an older reader would misread a newer ledger, or the same calls would lead to other decisions.
constexpr std::int64_t kLedgerVersion = 7;

/// What a device ran: items [begin, end) of the batch, or positions in the step's order, with its times on the step's
/// clock.
struct LedgerClaim {
  std::size_t device = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double start_seconds = 0.0;
  double finish_seconds = 0.0;
};

/// Writes the calls of a balancer as JSON lines: a header with the format's version and the options, then one line
/// per next_plan, record, retire, restore, hint and change of set_least_items. Doubles are written so that they read
/// back bit for bit. `paceline.balance.replay` (Python) and `paceline replay` run a fresh balancer through these calls
/// and compare plans.
///
///   {"paceline_ledger": 7, "options": {...}}
///   {"plan": {"step": 0, "batch_size": 512, "shares": [256, 256], "moved": false, "predicted_seconds": 0, "reason":
///   "..."}}
///   {"record": {"step": 0, "devices": [[[256, 0.03]], [[256, 0.031, true]]], "step_seconds": 0.031}}
///   {"retire": {"device": 1}}
///   {"restore": {"device": 1}}
///   {"least_items": 2}
///   {"hint": [[0.001, 0.0001], null]}
///   {"claims": {"step": 0, "batch_size": 512, "ran": [[0, 0, 256, 0.0001, 0.03], [1, 256, 512, 0.0001, 0.031]]}}
///
/// The last is no call: it says what really ran, by device in the order it ran, [device, begin, end, start, finish]
/// each, if micro-batches were worked off in smaller pieces also "pieces": [[device, begin, end], ...], and of a step
/// that dealt items out by cost also "order": [item, ...], which begin and end are positions in. A replay passes over
/// it. In a record a micro-batch is [items, seconds], with a third element true if it was
/// excluded; it has "reduction_seconds" and "startup_seconds" (null: no work) where they were measured.
///
/// Several balancers may write one ledger, each through a copy of the writer. Lines of the first one to write its
/// header are as above; those of the next one begin with "balancer": 1, and so on. Step numbers are the balancer's own.
///
/// Each line is flushed as soon as it is written, so that the ledger of a program that crashes is whole. Not
/// thread-safe, like the balancer it belongs to. The stream must outlive the writer.
class PACELINE_API LedgerWriter {
 public:
  explicit LedgerWriter(std::ostream& out);

  /// Whether a line could not be written. None is written after it: a ledger that lacks calls cannot be replayed.
  [[nodiscard]] bool failed() const noexcept { return sink_->failed; }

  /// To be called first. The lines that follow are of the balancer with these options.
  void header(const BalancerOptions& options);
  void plan(const StepPlan& plan);
  void record(std::int64_t step, const StepTimings& timings);
  void retire(std::size_t device);
  void restore(std::size_t device);
  void least_items(std::int64_t items);
  void hint(std::span<const std::optional<plan::CostModel>> models);
  void claims(std::int64_t step, std::int64_t batch_size, std::span<const LedgerClaim> ran,
              std::span<const LedgerClaim> pieces, std::span<const std::int64_t> order = {});

 private:
  /// What all writers of a ledger share.
  struct Sink {
    std::ostream* out;
    int balancers = 0;
    bool failed = false;
  };

  void line(const std::string& members);

  std::shared_ptr<Sink> sink_;
  int balancer_ = 0;
};

}  // namespace paceline::balance
