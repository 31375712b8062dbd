// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <paceline/balance/report.hpp>

namespace paceline::balance {

/// Judges each move by the clock: compares the steps before it with the steps after it. Models have no part in that.
///
/// Call started() when a move is made, and observe() after each step. Once 8 steps have run under the new shares,
/// observe() judges the move. A move that made steps longer by more than the resolution is taken back: the model was
/// wrong. The resolution is max(1 %, 3 standard errors of the difference of the two medians). A change point ends the
/// comparison, because times from before a change of speed do not compare with those after it.
class MoveJudge {
 public:
  struct Verdict {
    std::int64_t batch_size = 0;
    std::vector<std::int64_t> restore;  ///< the shares before the move
    double loss = 0.0;                  ///< how much longer steps took, relative
  };

  void started(std::int64_t step, std::int64_t batch_size, std::vector<std::int64_t> from, std::vector<std::int64_t> to,
               double promised_gain);

  /// `changed`: with this step's evidence a device's speed changed. `noise`: relative standard deviation of one
  /// device's time. Returns the move to take back, if any.
  std::optional<Verdict> observe(std::int64_t batch_size, double makespan_seconds, bool changed, double noise);

  /// Notes a step that did not run as planned, because devices took over much of another device's work. Its time says
  /// nothing about the shares in force. Where most of the last steps are like that, the rest are exceptions. Then a
  /// move from these shares, or to them, is not judged.
  void skip(std::int64_t batch_size);

  /// Forgets the times, because the shares changed for another reason: a device left, or a move was taken back.
  void reset(std::int64_t batch_size);
  void reset_all();

  [[nodiscard]] const std::vector<MoveReport>& moves() const { return moves_; }
  [[nodiscard]] std::int64_t taken_back() const { return taken_back_; }

 private:
  struct Pending {
    std::int64_t batch_size = 0;
    std::vector<double> before;
  };
  /// The last steps under the present shares.
  struct Times {
    std::vector<std::optional<double>> steps;  // seconds; none for a step in which others took work over
    std::int64_t last_used = 0;

    /// The times of the last steps that ran as planned, oldest first.
    [[nodiscard]] std::vector<double> seconds() const;
    /// Whether at least half of the steps ran as planned.
    [[nodiscard]] bool mostly_as_planned() const;
  };
  Times& times_of(std::int64_t batch_size);
  void overtake(MoveOutcome outcome);
  std::optional<Verdict> judge(const std::vector<double>& after, double noise);

  std::map<std::int64_t, Times> times_;  // per batch size
  std::int64_t observed_ = 0;            // steps
  std::optional<Pending> pending_;
  std::vector<MoveReport> moves_;
  std::int64_t taken_back_ = 0;
};

}  // namespace paceline::balance
