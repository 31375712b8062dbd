// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "balance/explorer.hpp"
#include "balance/move_judge.hpp"
#include "balance/policy.hpp"
#include "balance/target.hpp"

namespace paceline::balance {

/// Moves shares to what the measured speeds ask for, but only for a gain that is not noise.
///
/// propose() returns the first of these that applies:
/// 1. the old shares, if the last move is taken back;
/// 2. calibration shares, in the first steps, or with hints (Balancer::hint) only once the measured speeds contradict
/// them;
/// 3. while nothing is measured, the even split, or the best split by the hints;
/// 4. a probe of a device that has had no work for long, also at a batch size without shares: sizes that change with
///    each step would otherwise never probe;
/// 5. the target, at a batch size without shares;
/// 6. the target, if the gain that it promises exceeds max(1 %, 2 standard errors of that gain); otherwise the present
///    shares, or a step in which a device grows towards a better split. Without this gate a quiet box loses 2 to 4 %,
///    because the best of many noisy candidates always promises something.
///
/// The target is the exact split for the estimated times (best_split). Gains are judged by the medians.
///
/// A move that is decided while a device has few samples is provisional: it passed the gate, but its numbers are rough.
/// The target is then the split for times at a higher quantile, so that no device is overloaded. Once each device has
/// 48 samples the decision is completed, once: for this decision the gate asks for 2 standard errors only. Otherwise an
/// error of less than 1 % in the first rough numbers would stay for good.
///
/// A move to shares that a device never ran costs what first runs cost (SizeHistory). Such a move waits until waiting
/// has lost as much. This is ski rental: it loses at most twice what a policy loses that knows how long the gain lasts
/// (Karlin et al., Competitive snoopy caching, Algorithmica 3, 1988). Each batch size pays for its own moves. Its loss
/// counts for as long as the waiting move promises at least half of what it must. After that the loss is forgotten,
/// because a later move is another move.
///
/// After a move was taken back no move is made for 32 steps. The next time these steps double. A change point ends
/// this.
///
/// Driven by Balancer. A pure function of these calls: no clock, no random numbers.
class AutoPolicy {
 public:
  explicit AutoPolicy(const BalancerOptions& options) : explorer_(options.calibrate && !options.proportional) {}

  /// Before every step. Asked again without an observe() in between (the step failed), it proposes the same for the
  /// same batch size, unless a device was retired.
  Proposal propose(const PolicyContext& context);
  /// After every step that succeeded, once the estimator has taken its timings. `makespan_seconds`: 0 if it does not
  /// compare with other steps.
  void observe(const PolicyContext& context, const StepTimings& timings, double makespan_seconds);
  /// A device left or came back, or the shares in force have become too small: what was learned of splits is void.
  void reset();
  /// Fills the policy's part of the report.
  void describe(BalanceReport& report) const;

 private:
  struct Decision : Promise {
    std::vector<std::int64_t> target;
  };
  [[nodiscard]] static Decision decide(const PolicyContext& context, const std::vector<std::int64_t>& present,
                                       bool settled, double least_gain);
  /// What waiting with a move has cost.
  struct Rent {
    double seconds = 0.0;    // lost so far
    std::int64_t step = -1;  // of the last loss; a step counts once, however often it is planned
    std::vector<std::int64_t> target;
  };
  [[nodiscard]] static double cost_of(const PolicyContext& context, const std::vector<std::int64_t>& shares);
  void forget_broken_promise(const PolicyContext& context, const std::vector<std::int64_t>& present, double required);
  double lost_with(const PolicyContext& context, const Decision& decision);
  [[nodiscard]] Proposal gate(const PolicyContext& context, const std::vector<std::int64_t>& present);

  Explorer explorer_;
  std::map<std::int64_t, Rent> rents_;  // by batch size
  // Batch sizes whose split is yet to be completed, and the steps of their moves.
  std::map<std::int64_t, std::int64_t> provisional_;
  MoveJudge judge_;
  std::optional<MoveJudge::Verdict> take_back_;
  std::int64_t seen_change_points_ = 0;
  std::int64_t firm_steps_ = 0;  // after the last move that was taken back
  std::int64_t firm_until_step_ = 0;
  double last_required_ = 0.0;
};

}  // namespace paceline::balance
