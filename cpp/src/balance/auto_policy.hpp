// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "balance/calibration.hpp"
#include "balance/policy.hpp"
#include "balance/probe.hpp"
#include "balance/trial.hpp"

namespace paceline::balance {

/// Moves shares to where the measured speeds want them, but only for a gain that is not noise.
///
/// A proposal is, in this order: the shares of a move taken back; calibration shares; the even split while nothing is
/// known; a probe of a device that has had no work for long, whether or not this batch size has shares yet, since sizes
/// that keep changing never have; the target, where it has none; else the present shares, or the target if its promised
/// gain exceeds max(1 %, 2 standard errors of that gain). Without the gate the smallest of many noisy candidates always
/// promises something, and a quiet box loses 2 to 4 %.
///
/// A move decided while a device that matters has few samples is provisional: it passed the gate against the split that
/// was settled, but its numbers are rough. Once 48 steps are in, the decision is completed, once: the target then
/// counts from 2 standard errors on. Otherwise what the first rough numbers got wrong by less than 1 % would stay for
/// good.
///
/// A move to shares that a device never ran costs what first runs cost (SizeHistory). Such a move waits until what was
/// lost by not making it is as much: ski rental, at most twice what would be lost by one who knows how long the gain
/// lasts (Karlin et al., Competitive snoopy caching, Algorithmica 3, 1988). So each batch size pays for its own moves,
/// and what it lost counts, whatever else changes, while the move that it waits with still promises half of what it
/// must; then it is forgotten, since what comes later is another move.
///
/// The target is the exact split for the estimated times; of a provisional move for times at a higher quantile
/// (best_split), so that rough numbers overload nobody. Gains are judged by the medians.
///
/// Where only a split that would let a device grow too much is better, that device grows in single steps off the split,
/// at most twofold each, until its time at the larger size is measured. So does one of a class that was left out before
/// it had run two sizes, eight times at most: how much of its time is fixed is a guess.
///
/// After a move was taken back the required gain doubles and no move is made for 32 steps, twice that the next time; a
/// change point or a move that measurably paid ends this.
class AutoPolicy final : public Policy {
 public:
  explicit AutoPolicy(const BalancerOptions& options) : calibration_(options.calibrate && !options.proportional) {}

  Proposal propose(const PolicyContext& context) override;
  void observe(const PolicyContext& context, const StepTimings& timings, double makespan_seconds) override;
  void retired(const PolicyContext& context) override;
  void describe(BalanceReport& report) const override;

 private:
  /// What the last proposal was: the split in force, or a step off it for what it teaches.
  enum class Planned : std::uint8_t { split, calibration, probe, hope };
  struct Decision {
    std::vector<std::int64_t> target;
    double gain = 0.0;
    double saved_seconds = 0.0;  ///< of each step
    double required = 0.0;
  };
  void judge(const PolicyContext& context, const std::vector<plan::CostModel>& models,
             const std::vector<std::int64_t>& present, double least_gain, Decision& decision) const;
  [[nodiscard]] Decision decide(const PolicyContext& context, const std::vector<std::int64_t>& present, bool settled,
                                double least_gain) const;
  /// Of a move that waits.
  struct Rent {
    double seconds = 0.0;    // lost so far
    std::int64_t step = -1;  // of the last loss: counted once, however often a step is planned
    std::vector<std::int64_t> target;
  };
  [[nodiscard]] double cost_of(const PolicyContext& context, const std::vector<std::int64_t>& shares) const;
  void forget_broken_promise(const PolicyContext& context, const std::vector<std::int64_t>& present, double required);
  [[nodiscard]] std::optional<std::vector<std::int64_t>> grow(const PolicyContext& context,
                                                              const std::vector<std::int64_t>& present);
  double lost_with(const PolicyContext& context, const Decision& decision);
  [[nodiscard]] Proposal gate(const PolicyContext& context, const std::vector<std::int64_t>& present);

  Calibration calibration_;
  Probe probe_;
  Planned planned_ = Planned::split;
  std::map<std::int64_t, Rent> rents_;  // by batch size
  // Batch sizes whose split is yet to be completed, and the steps of their moves.
  std::map<std::int64_t, std::int64_t> provisional_;
  TrialLog trials_;
  std::optional<TrialLog::Verdict> take_back_;
  std::int64_t seen_change_points_ = 0;
  std::int64_t setbacks_ = 0;
  int hopes_ = 0;  // steps planned for what a class may turn out to be
  std::int64_t firm_until_step_ = 0;
  double last_required_ = 0.0;
};

}  // namespace paceline::balance
