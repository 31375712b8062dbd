// SPDX-License-Identifier: Apache-2.0
#include "balance/move_judge.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "balance/bounded.hpp"
#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kStepsKept = 32;
constexpr std::size_t kTimesKept = 16;        // of these steps
constexpr std::size_t kTimedBatchSizes = 32;  // a data loader with lengths has many; beyond, old ones are forgotten
constexpr std::size_t kStepsToJudge = 8;
constexpr std::size_t kMovesKept = 16;
constexpr double kLeastResolution = 0.01;
constexpr double kResolutionErrors = 3.0;
constexpr double kMaxOverNoise = 0.5;  // the largest of several device times varies about half as much as one

}  // namespace

void MoveJudge::overtake(MoveOutcome outcome) {
  if (!pending_) return;
  moves_.back().outcome = outcome;
  pending_.reset();
}

void MoveJudge::started(std::int64_t step, std::int64_t batch_size, std::vector<std::int64_t> from,
                        std::vector<std::int64_t> to, double promised_gain) {
  overtake(MoveOutcome::overtaken);
  keep_last(moves_, {step, batch_size, std::move(from), std::move(to), promised_gain, 0.0, 0.0, MoveOutcome::pending},
            kMovesKept);
  const Times& times = times_[batch_size];
  pending_ = Pending{batch_size, times.seconds()};
  if (pending_->before.empty() || !times.mostly_as_planned()) overtake(MoveOutcome::unjudged);
  reset(batch_size);
}

void MoveJudge::skip(std::int64_t batch_size) {
  Times& times = times_of(batch_size);
  keep_last(times.steps, std::nullopt, kStepsKept);
  if (pending_ && pending_->batch_size == batch_size && times.steps.size() == kStepsKept &&
      !times.mostly_as_planned()) {
    overtake(MoveOutcome::unjudged);
  }
}

std::vector<double> MoveJudge::Times::seconds() const {
  std::vector<double> seconds;
  for (auto step = steps.rbegin(); step != steps.rend() && seconds.size() < kTimesKept; ++step) {
    if (*step) seconds.push_back(**step);
  }
  std::reverse(seconds.begin(), seconds.end());
  return seconds;
}

bool MoveJudge::Times::mostly_as_planned() const {
  const std::ptrdiff_t skipped = std::count(steps.begin(), steps.end(), std::nullopt);
  return 2 * skipped <= std::ssize(steps);
}

MoveJudge::Times& MoveJudge::times_of(std::int64_t batch_size) {
  if (pending_ && times_.contains(pending_->batch_size)) times_[pending_->batch_size].last_used = observed_;
  make_room(times_, batch_size, kTimedBatchSizes, [](const Times& one) { return one.last_used; });
  Times& times = times_[batch_size];
  times.last_used = ++observed_;
  return times;
}

void MoveJudge::reset(std::int64_t batch_size) { times_.erase(batch_size); }

void MoveJudge::reset_all() {
  overtake(MoveOutcome::overtaken);
  times_.clear();
}

std::optional<MoveJudge::Verdict> MoveJudge::observe(std::int64_t batch_size, double makespan_seconds, bool changed,
                                                     double noise) {
  if (changed) {
    overtake(MoveOutcome::overtaken);
    times_.clear();  // of other conditions
  }
  if (makespan_seconds <= 0.0) return std::nullopt;
  Times& here = times_of(batch_size);
  keep_last(here.steps, makespan_seconds, kStepsKept);
  const std::vector<double> times = here.seconds();
  if (!pending_ || pending_->batch_size != batch_size || times.size() < kStepsToJudge || !here.mostly_as_planned()) {
    return std::nullopt;
  }
  return judge(times, noise);
}

std::optional<MoveJudge::Verdict> MoveJudge::judge(const std::vector<double>& after, double noise) {
  const std::vector<double>& before = pending_->before;
  const double median_before = plan::median(before);
  const double median_after = plan::median(after);
  std::vector<double> spread;
  for (const double seconds : before) spread.push_back(std::abs(seconds / median_before - 1.0));
  for (const double seconds : after) spread.push_back(std::abs(seconds / median_after - 1.0));
  const double deviation = std::max(plan::from_median_deviation(plan::median_in_place(spread)), kMaxOverNoise * noise);
  const double error =
      std::hypot(plan::median_error(deviation, before.size()), plan::median_error(deviation, after.size()));
  MoveReport& move = moves_.back();
  move.measured_gain = 1.0 - median_after / median_before;
  move.resolution = std::max(kLeastResolution, kResolutionErrors * error);
  const double loss = median_after / median_before - 1.0;
  if (loss <= move.resolution) {
    overtake(MoveOutcome::kept);
    return std::nullopt;
  }
  const Verdict verdict{move.batch_size, move.from, loss};
  overtake(MoveOutcome::taken_back);
  ++taken_back_;
  reset(verdict.batch_size);
  return verdict;
}

}  // namespace paceline::balance
