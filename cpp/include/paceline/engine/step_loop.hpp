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
#include <paceline/device_id.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/memory_report.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>
#include <paceline/observe/event_ring.hpp>
#include <paceline/observe/history.hpp>
#include <paceline/observe/metrics.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

struct StepLoopOptions {
  Balance balance = Balance::automatic;  ///< even and weighted: exactly the shares, nothing is taken over
  std::vector<double> weights{};         ///< for weighted: the ratios, one per device
  std::int64_t micro_batch = 0;          ///< > 0: fixed size; 0: one planned chunk per device, then corrections
  /// As balance::BalancerOptions::granularity. 0 means 1 on host devices, with fixed ratios, and for items with costs.
  std::int64_t granularity = 1;
  /// With micro_batch 0 and Balance::automatic: whether devices hold back a part of their shares. Devices that finish
  /// early then take smaller and smaller corrections from that part (plan::plan_hold_back). The default is true for
  /// host devices. It is false for devices that work after the call, because a new size may make them compile, capture
  /// or choose algorithms again. Corrections are multiples of `granularity`.
  /// With a micro_batch, or costs: devices that finish early take over micro-batches of others. With two GPUs or more
  /// only if this is true: a device knows its last micro-batch only if it gets no others, and then its gradients can be
  /// summed while it computes.
  std::optional<bool> corrections{};
  /// The fewest items of a micro-batch. A smaller batch is one micro-batch, and `micro_batch` may be less. Fewer
  /// devices run a small batch, and the micro-batch before a short last one gives up items to it. This is for programs
  /// that normalise over their micro-batch, which one item does not allow.
  std::int64_t least_items = 1;
  /// For devices that work after the call: DeviceQueueOptions::run_ahead.
  std::int64_t run_ahead = 1;
  /// The most bytes that a micro-batch may take on each device. 0 or an empty list: no limit. A claim that would take
  /// more runs in pieces; StepProgram::memory_bytes says what a piece took. See also StepLoop::shrink.
  std::vector<std::int64_t> memory_limits{};
  /// Whether to search for a faster size of micro-batches during training: a few steps in a hundred try smaller ones.
  /// This has an effect only with micro_batch 0, granularity 1 and least_items 1, and on host devices only.
  bool search_sizes = false;
};

/// Exactly what a step runs, for example to repeat a recorded step.
struct StepScript {
  std::vector<std::vector<MicroBatch>> claims{};  ///< as StepOptions::script
  std::vector<std::vector<MicroBatch>> pieces{};  ///< per device, its claims cut into pieces; empty: claims run whole
};

/// Runs one balanced step after another on one group: plan, run, commit. Trainers in C++ and Python are built on it.
///
///   auto step = step_loop.begin(step_loop.plan(batch_size), program);
///   step->wait();
///   if (step->failure() == nullptr) step_loop.commit(step);   // only now do the balancer and the metrics learn of it
///
/// Devices that work after the call may be two steps behind: the third step waits for them. The plan stays the same
/// until their times are known.
///
/// One step at a time, on a share of the group: steps take turns with all else that uses the devices. Not thread-safe,
/// except that any thread may call metrics(), events(), history() and cancel().
class PACELINE_API StepLoop {
 public:
  /// @throws InvalidArgument if balance and weights do not fit the group.
  StepLoop(const DeviceGroup& group, StepLoopOptions options);
  ~StepLoop();
  StepLoop(const StepLoop&) = delete;
  StepLoop& operator=(const StepLoop&) = delete;

  /// Plans a batch of `batch_size` items, at least one, that all cost the same.
  [[nodiscard]] std::shared_ptr<const BatchPlan> plan(std::int64_t batch_size, const BatchKind& kind = {});
  /// Plans a batch whose items do not cost the same. `costs` has one cost per item, in any unit (tokens). The balancer
  /// then splits work instead of items. Each device's items are sorted and packed into micro-batches of similar length,
  /// of at most StepLoopOptions::micro_batch items. The time that an item of a certain cost takes is learned. Steps
  /// with costs and steps without have a balancer each; metrics(), events() and history() cover both.
  /// @throws InvalidArgument if there is no item, or a cost is negative or not finite.
  [[nodiscard]] std::shared_ptr<const BatchPlan> plan(std::span<const double> costs);

  /// Hands a plan to the workers, which call program->run() for its micro-batches. Returns at once.
  /// @throws InvalidArgument if it is not the last plan that was made.
  [[nodiscard]] std::shared_ptr<Step> begin(std::shared_ptr<const BatchPlan> plan,
                                            std::shared_ptr<StepProgram> program);
  /// As begin(), but the workers start only when the caller calls Step::start(). Python releases its lock in between. A
  /// `script` says exactly what to run, in place of the plan.
  /// @throws InvalidArgument for a script that does not run each item once.
  [[nodiscard]] std::shared_ptr<Step> prepare(std::shared_ptr<const BatchPlan> plan,
                                              std::shared_ptr<StepProgram> program, StepScript script = {});
  /// Call it when a step of the last plan has failed because memory ran out. From now on, in batches of this kind, a
  /// device runs at most half of the failed micro-batch at once. This holds for all devices that share the memory, or
  /// with `limited` for the failed device alone, because it has reached its own limit. Returns true if the step can be
  /// planned and run again, false if there is nothing smaller to run.
  [[nodiscard]] bool shrink(const Step& failed, bool limited = false);
  /// For each device with a limit, what is known of its memory.
  [[nodiscard]] std::vector<MemoryReport> memory_report() const;
  /// What items cost in time. None before the first plan with costs.
  [[nodiscard]] std::optional<ItemReport> item_report() const;

  /// Change StepLoopOptions::corrections and least_items from the next plan on.
  /// @throws InvalidArgument like the constructor.
  void set_corrections(std::optional<bool> corrections);
  void set_least_items(std::int64_t items);
  /// From the next step on micro-batches end within so many seconds, as far as is known; 0: they take what they take.
  /// This is for other work on the same devices, which waits for one micro-batch. It has an effect where a search for
  /// sizes would have one, with StepLoopOptions::search_sizes or without. Devices learn the sizes in the first steps.
  /// @throws InvalidArgument if the seconds are negative or not finite.
  void set_longest(double seconds);

  /// The device gets no work from the next step on, with costs or without, and no step waits for it. It stays in the
  /// group, and restore() brings it back.
  /// @throws InvalidArgument if there is no such device, if it is the last one that works, or while a step runs.
  void retire(DeviceId device);
  void restore(DeviceId device);
  [[nodiscard]] bool retired(DeviceId device) const;

  /// What is measured of each device: the seconds of n items, or with `by_cost` of n units of work. None for a device
  /// that has not been measured. Another run may begin with it: see hint().
  [[nodiscard]] std::vector<std::optional<plan::CostModel>> speeds(bool by_cost = false) const;
  /// Plans begin with the shares that fit these speeds, in place of even ones, until something is measured
  /// (Balancer::hint). With `by_cost`: plans of steps with costs.
  /// @throws InvalidArgument for another number of models than devices, or while a step runs.
  void hint(const std::vector<std::optional<plan::CostModel>>& models, bool by_cost = false);

  /// Cancels the running step, if any (see Step::cancel). Any thread may call it, also while another thread is in
  /// begin() or commit().
  void cancel();
  /// @throws InvalidArgument while the workers still run an earlier step.
  void require_idle() const;

  /// Takes note of a step that succeeded and whose result the caller has committed. Its times may come later: the next
  /// plan(), commit() and settle() look for them.
  /// @throws InvalidArgument for a step that has no plan: a StepLoop has not prepared it.
  void commit(std::shared_ptr<const Step> step);
  /// Waits until the times of all committed steps are known. Any thread may call it while another one steps.
  /// @throws Error if a device has failed. The steps whose times are not known are dropped then, so later calls do not
  /// throw it again. If another thread than that of the last commit() gets the error, the next plan() or commit()
  /// throws it, too, once.
  void settle();
  /// Drops the committed steps whose times are not known yet, because one of them has failed. The balancer and the
  /// metrics do not get them.
  void forget_unsettled() noexcept;
  /// How many steps the history has, or will have once the times of all committed steps are known.
  [[nodiscard]] std::int64_t committed() const;

  /// From now on the ledger gets every call of the balancers, and what really ran in each step. Attach it before the
  /// first step (see Balancer::write_to()). The ledger has the calls of both balancers: the one of steps with costs and
  /// the one of steps without.
  /// @throws InvalidArgument after the first plan.
  void write_to(std::shared_ptr<balance::LedgerWriter> ledger);
  [[nodiscard]] bool writes_ledger() const noexcept;
  /// Whether a step was ever planned, with costs or without.
  [[nodiscard]] bool has_planned() const noexcept;

  /// The balancer's explanation; why devices are slow, from their sensors and counters; what limits memory; and the
  /// size of micro-batches that was found.
  [[nodiscard]] std::string explain() const;

  /// The balancer's part of the last plan.
  [[nodiscard]] const balance::StepPlan& last_plan() const noexcept;
  /// Whether the last plan had costs. Its shares, and those of balancer(), then count work instead of items.
  [[nodiscard]] bool by_cost() const noexcept;
  [[nodiscard]] const StepRecord& last_step() const noexcept;
  [[nodiscard]] observe::Metrics metrics() const;
  [[nodiscard]] const observe::EventRing& events() const noexcept;
  [[nodiscard]] const observe::History& history() const noexcept;
  /// The balancer of the last plan: the one for steps with costs, or the one for steps without.
  [[nodiscard]] balance::Balancer& balancer() noexcept;
  [[nodiscard]] const balance::Balancer& balancer() const noexcept;
  [[nodiscard]] const DeviceGroup& group() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace paceline
