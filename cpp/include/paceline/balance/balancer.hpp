// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/balance/balance.hpp>
#include <paceline/balance/report.hpp>
#include <paceline/balance/what_if.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::balance {

class LedgerWriter;

/// A device as the balancer sees it. Devices of one class share the shape of their cost model.
struct DeviceProfile {
  std::string name;          ///< "host:0"
  std::string device_class;  ///< "host"; devices of one class are equal until measured otherwise
  plan::ShareLimits limits;  ///< startup_seconds holds until it is measured (StepTimings::startup_seconds)
};

struct BalancerOptions {
  std::vector<DeviceProfile> devices;
  Balance policy = Balance::automatic;
  std::vector<double> weights;  ///< for "weighted": one per device
  /// Shares are multiples of it. 0, for "auto" only: of about 1/32 of an even share, so that shares that move have few
  /// sizes. Then the slowest device takes 0.5 % longer on average, and at most 3 %.
  std::int64_t granularity = 1;
  /// As in plan::SplitOptions, or empty. What steps measure (StepTimings::reduction_seconds) takes its place.
  std::vector<double> reduction_seconds;
  /// "auto" only: run the first steps with shares off the even split, so that the constant part of a step's time can
  /// be told from the part per item. Ends by itself as soon as the timings tell the two apart.
  bool calibrate = true;
  /// What is split are units of work, so a device's time is in proportion to its share: no fixed part is looked for.
  bool proportional = false;
  std::string unit = "items";  ///< what batches and shares count, for texts and readers of the ledger
};

/// One micro-batch that ran.
struct MicroBatchTiming {
  std::int64_t items = 0;
  double seconds = 0.0;   ///< compute only, by the device's own clock
  bool excluded = false;  ///< first run of a size, compilation: counted as work, not as evidence
  friend bool operator==(const MicroBatchTiming&, const MicroBatchTiming&) = default;
};

/// What one step measured: one list per device, empty where a device had no work.
struct StepTimings {
  std::vector<std::vector<MicroBatchTiming>> devices;
  double step_seconds =
      0.0;  ///< first start to last finish of the compute; 0: unknown, the slowest device's sum is taken
  double reduction_seconds = 0.0;  ///< from then to the end of the step; 0: unknown
  /// Per device from the step's first start to its own, none without work; a device that came when nothing was left to
  /// do: the whole compute time, since it started no earlier. Empty: unknown.
  std::vector<std::optional<double>> startup_seconds = {};
  /// Per device the part, from 0 to 1, of its time in the step in which it did other work, such as the requests of a
  /// pool. The seconds above are without that. Empty: none.
  std::vector<double> lent_parts = {};
};

/// What to run next, and the numbers behind it.
struct StepPlan {
  std::int64_t step = 0;
  std::int64_t batch_size = 0;
  std::int64_t granularity = 1;  ///< what the shares are multiples of, but for the rest of the batch
  std::vector<std::int64_t> shares;
  std::vector<plan::CostModel> models;  ///< the present estimate per device; empty before the first timing.
                                        ///< Where little is known of its fixed part, with as little as it may have
  std::vector<double> noise;            ///< relative standard deviation of one micro-batch, per device
  bool moved = false;                   ///< shares differ from the last plan's for the same batch size
  double predicted_seconds = 0.0;       ///< makespan by `models`; 0 before the first timing
  std::string reason;                   ///< one sentence
};

/// The closed loop: timings in, plans out. Every plan is a pure function of the options and of the calls
/// made so far (batch sizes asked, timings recorded, devices retired, hints): no clock, no random numbers, no thread. A
/// ledger of the calls (ledger.hpp) replays to the same plans. Not thread-safe; one thread at a time.
///
/// "auto" calibrates on the first steps, then keeps an even split until measured differences are worth more than their
/// uncertainty: it moves when the promised gain exceeds max(1 %, 2 standard errors), and takes back a move that
/// measures worse. How a device's speed is estimated stands in report.hpp; memory is bounded, whatever the number of
/// steps and batch sizes.
///
/// @code
/// Balancer balancer({.devices = {{"host:0", "host", {}}, {"host:1", "host", {}}}});
/// StepPlan plan = balancer.next_plan(512);            // run plan.shares, then
/// balancer.record({.devices = {{{256, 0.030}}, {{256, 0.031}}}, .step_seconds = 0.031});
/// @endcode
class PACELINE_API Balancer {
 public:
  /// @throws InvalidArgument for no devices, an unknown policy, weights that do not fit, a granularity below 0,
  /// or of 0 with fixed ratios.
  explicit Balancer(BalancerOptions options);
  ~Balancer();
  Balancer(Balancer&&) noexcept;
  Balancer& operator=(Balancer&&) noexcept;

  /// The plan of the next step. Shares sum to `batch_size`. Asked again without a record in between (a step that
  /// failed), it returns the same plan with the same step number.
  /// @throws InvalidArgument if batch_size < 1 or no split respects the limits; nothing changes then.
  StepPlan next_plan(std::int64_t batch_size);

  /// The timings of the plan that next_plan last returned. A step that failed is never recorded.
  /// @throws InvalidArgument without a plan, for a wrong number of devices, or a time that is negative or not finite.
  void record(const StepTimings& timings);

  /// The device gets no further work: it failed or left. The plans that follow share its part among the others.
  /// @throws InvalidArgument if there is no such device or it is the last one.
  void retire(std::size_t device);
  /// A device that was retired gets work again, from the next plan on, by what is known of it from before.
  /// @throws InvalidArgument if there is no such device.
  void restore(std::size_t device);
  [[nodiscard]] bool retired(std::size_t device) const;

  /// What an earlier run measured of each device (DeviceReport), or none. Policy "auto" then begins with the best split
  /// by these models, in place of the even split and the calibration. Without a model, a device counts as fast as the
  /// fastest of its class that has one, or else as the fastest of all. Timings take the place of the models: only how
  /// the time depends on the size stays, as a weak guess. So a wrong model is corrected like any shares that do not
  /// fit, and a device that got no work is tried soon. After the first timing, and without any model, hint() does
  /// nothing.
  /// @throws InvalidArgument for another number of models than devices.
  void hint(std::span<const std::optional<plan::CostModel>> models);

  /// From the next plan on no share has fewer items, unless it is zero or the batch itself has fewer: fewer devices
  /// then run a small batch. Shares in force that are too small are planned anew. 1, as at first: any share will do.
  /// @throws InvalidArgument for less than 1.
  void set_least_items(std::int64_t items);

  [[nodiscard]] const BalancerOptions& options() const noexcept;
  [[nodiscard]] std::int64_t least_items() const noexcept;

  /// What is known and what was decided, as numbers.
  [[nodiscard]] BalanceReport report() const;

  /// In words: what was seen, what was decided and why, what a move would gain, what it does not know.
  /// `causes`: what may slow each device, to be quoted. One text per device, which may be empty, or no texts at all.
  /// @throws InvalidArgument for another number of causes.
  [[nodiscard]] std::string explain(std::span<const std::string> causes = {}) const;

  /// What would the best split be, and how long a step, if devices had other speeds, came or left? By the present
  /// estimates; changes nothing and is not in the ledger.
  /// @throws InvalidArgument before the first timing, for speeds that do not fit, devices that are not there, or a
  /// batch that does not fit in those that are left.
  [[nodiscard]] WhatIfAnswer what_if(const WhatIfOptions& asked) const;

  /// Changes of shares so far, for unchanged batch sizes.
  [[nodiscard]] std::int64_t move_count() const noexcept;

  /// From now on every call is written to `ledger`, or to none if null. Attach before the first plan: a ledger that
  /// lacks plans cannot be replayed, so attaching later throws InvalidArgument.
  void write_to(std::shared_ptr<LedgerWriter> ledger);
  /// Whether a plan was asked for or a device retired: from then on no ledger can be attached.
  [[nodiscard]] bool called() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace paceline::balance
