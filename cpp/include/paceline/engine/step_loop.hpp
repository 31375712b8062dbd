// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balance.hpp>
#include <paceline/balance/balancer.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/memory_report.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>
#include <paceline/observe/event_ring.hpp>
#include <paceline/observe/history.hpp>
#include <paceline/observe/metrics.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

struct StepLoopOptions {
  Balance balance = Balance::automatic;  ///< even and weighted: exactly the shares, nothing is taken over
  std::vector<double> weights{};         ///< for weighted: the ratios, one per device
  std::int64_t micro_batch = 0;          ///< > 0: fixed size; 0: one planned chunk per device, then corrections
  std::int64_t granularity = 1;
  /// With micro_batch 0 and "auto": whether devices hold back a part of their shares, of which those that are done
  /// early take ever smaller corrections (plan::plan_tail). By default host devices do; devices that work after the
  /// call do not, for each new size may make them compile, capture or choose algorithms anew. `granularity` bounds the
  /// sizes.
  std::optional<bool> corrections{};
  /// No micro-batch has fewer items, unless the batch has, or `micro_batch` is less: fewer devices then run a small
  /// batch, and of a short last micro-batch the one before takes part. For programs that normalise over their
  /// micro-batch, and cannot over one item.
  std::int64_t least_items = 1;
  /// Of devices that work after the call, as DeviceQueueOptions has it.
  std::int64_t run_ahead = 1;
  /// How many bytes a micro-batch may take on each device, 0 for any; empty: any on all. Claims that take more run in
  /// pieces, as StepProgram::memory_bytes tells. Whatever the limits: see StepLoop::shrink.
  std::vector<std::int64_t> memory_limits{};
  /// Whether the size of micro-batches is searched for while training: a few steps of a hundred try smaller ones. Only
  /// with a micro_batch of 0 and a granularity of 1, and where no device works after the call.
  bool search_sizes = false;
};

/// Steps that run as they once ran.
struct StepScript {
  std::vector<std::vector<MicroBatch>> claims{};  ///< as StepOptions::script
  std::vector<std::vector<MicroBatch>> pieces{};  ///< of each device, in which its claims were worked off; empty: whole
};

/// One balanced step after another on one group: plan, run, commit. What trainers in any language are made of.
///
///   auto step = step_loop.begin(step_loop.plan(batch_size), program);
///   step->wait();
///   if (step->failure() == nullptr) step_loop.commit(step);   // only now do the balancer and the metrics learn of it
///
/// Devices that work after the call may be two steps behind: the caller is held up by the third. Until their times are
/// known the plan stays as it is.
///
/// One step at a time; not thread-safe, but metrics(), events() and history() may be read from any thread, and cancel()
/// called.
class PACELINE_API StepLoop {
 public:
  /// @throws InvalidArgument if balance and weights do not fit the group.
  StepLoop(DeviceGroup group, StepLoopOptions options);
  ~StepLoop();
  StepLoop(const StepLoop&) = delete;
  StepLoop& operator=(const StepLoop&) = delete;

  /// Plans a batch of so many items, at least one.
  [[nodiscard]] std::shared_ptr<const BatchPlan> plan(std::int64_t batch_size, const BatchKind& kind = {});
  /// Plans a batch whose items do not cost the same: one cost per item, in any unit (tokens). The devices' work is
  /// balanced, not their items, by what the balancer decides (`balance` holds as it is); each device's items are sorted
  /// and packed into micro-batches of similar length, of at most StepLoopOptions::micro_batch items. What an item costs
  /// in time is learned. Steps with costs and steps without are measured apart, each kind by a balancer of its own;
  /// metrics(), events() and history() have both.
  /// @throws InvalidArgument without items, and for a cost that is negative or not finite.
  [[nodiscard]] std::shared_ptr<const BatchPlan> plan(std::span<const double> costs);

  /// Hands a plan to the workers; program->run() gets its micro-batches. Nothing waits.
  /// @throws InvalidArgument if it is not the last plan that was made.
  [[nodiscard]] std::shared_ptr<Step> begin(std::shared_ptr<const BatchPlan> plan,
                                            std::shared_ptr<StepProgram> program);
  /// begin() without its end, for callers that let go of something before the workers start: Step::start() hands the
  /// step to them. With a `script` the step runs as that says, whatever the plan.
  /// @throws InvalidArgument for a script that does not run each item once.
  [[nodiscard]] std::shared_ptr<Step> prepare(std::shared_ptr<const BatchPlan> plan,
                                              std::shared_ptr<StepProgram> program, StepScript script = {});
  /// After a step of the last plan that failed because memory ran out: from now on at most half of the micro-batch that
  /// failed runs at once, in batches of its kind, on all devices that share the memory. `limited`: on this device
  /// alone, since its limit was reached. False: there is nothing smaller, so the failure stands. True: plan and run it
  /// again.
  [[nodiscard]] bool shrink(const Step& failed, bool limited = false);
  /// Of each device with a limit.
  [[nodiscard]] std::vector<MemoryReport> memory_report() const;
  /// What items cost, as far as that is known; none before the first plan with costs.
  [[nodiscard]] std::optional<ItemReport> item_report() const;

  /// StepLoopOptions::corrections and least_items, from the next plan on.
  /// @throws InvalidArgument as the constructor.
  void set_corrections(std::optional<bool> corrections);
  void set_least_items(std::int64_t items);

  /// The device gets no work from the next step on, with costs or without, and no step waits for it. It stays in the
  /// group, and restore() brings it back.
  /// @throws InvalidArgument for an index that there is none of, for the last device that works, and while a step runs.
  void retire(std::size_t device);
  void restore(std::size_t device);
  [[nodiscard]] bool retired(std::size_t device) const;

  /// Cancels the step that runs, if any (see Step::cancel). Any thread, also while another is in begin() or commit().
  void cancel();
  /// @throws InvalidArgument while the workers are still at an earlier step.
  void require_idle() const;

  /// Takes note of a step that succeeded and whose result the caller has committed. Its times may come later: the next
  /// plan(), commit() and settle() look for them.
  /// @throws InvalidArgument for a step that has no plan: a StepLoop has not prepared it.
  void commit(std::shared_ptr<const Step> step);
  /// Returns when the times of all steps are known that were committed. @throws Error if a device has failed.
  void settle();
  /// Drops the committed steps whose times are not known yet, after one of them has failed. The balancer and the
  /// metrics never learn of them.
  void forget_unsettled() noexcept;

  /// From now on every call of the balancers goes to `ledger`, and what really ran in each step. As
  /// Balancer::write_to(): attach before the first step. Steps with costs and steps without are decided by a balancer
  /// each, and the ledger has the calls of both.
  /// @throws InvalidArgument once a step was planned, with costs or without.
  void write_to(std::shared_ptr<balance::LedgerWriter> ledger);
  [[nodiscard]] bool writes_ledger() const noexcept;
  /// Whether a step was ever planned, with costs or without.
  [[nodiscard]] bool has_planned() const noexcept;

  /// The balancer's explanation, with what its devices' sensors and counters say about those that are slow, what memory
  /// limits, and the size of micro-batches that was found.
  [[nodiscard]] std::string explain() const;

  /// The balancer's part of the last plan.
  [[nodiscard]] const balance::StepPlan& last_plan() const noexcept;
  /// Whether the last plan was of items with costs: what its shares, and balancer()'s, count is then work.
  [[nodiscard]] bool by_cost() const noexcept;
  [[nodiscard]] const StepRecord& last_step() const noexcept;
  [[nodiscard]] observe::Metrics metrics() const;
  [[nodiscard]] const observe::EventRing& events() const noexcept;
  [[nodiscard]] const observe::History& history() const noexcept;
  /// Of the kind of steps, with costs or without, that was planned last.
  [[nodiscard]] balance::Balancer& balancer() noexcept;
  [[nodiscard]] const balance::Balancer& balancer() const noexcept;
  [[nodiscard]] const DeviceGroup& group() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace paceline
