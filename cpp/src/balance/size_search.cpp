// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/size_search.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "plan/statistics.hpp"

namespace paceline::balance {
namespace {

constexpr std::int64_t kNextSearch = 500;  // steps, after which another size may be the best
constexpr std::int64_t kPairs = 3;         // comparisons at least, each of a trial with the steps around it
constexpr std::int64_t kMostPairs = 20;    // comparisons at most, where times vary much
constexpr double kGain = 0.95;             // a size is taken if an item takes at most this part of the time
constexpr double kSearchErrors =
    2.5;  // standard errors that end the search; more than 2, as the ratio is the least of several
constexpr double kAlikeSizes = 1.03;    // the largest size is taken whose time is at most this many times the best
constexpr double kLeastSeconds = 5e-3;  // of a micro-batch; smaller ones cost more in calls than they gain
constexpr std::size_t kMostSizes = 6;   // in one search
constexpr double kWhole = std::numeric_limits<double>::infinity();  // as a size: a claim in one piece

/// The median deviation of few values is often too small, so a term for few values is added.
double variance_of_median(const std::vector<double>& values) {
  const double middle = plan::median(values);
  std::vector<double> deviations;
  for (const double value : values) deviations.push_back(std::abs(value - middle));
  const double deviation = plan::from_median_deviation(plan::median_in_place(deviations));
  const auto count = static_cast<double>(values.size());
  return (1.0 + 4.0 / count) * std::numbers::pi / 2.0 * deviation * deviation / count;
}

std::int64_t items_of(const std::vector<TimedPiece>& claim) {
  std::int64_t items = 0;
  for (const TimedPiece& piece : claim) items += piece.items;
  return items;
}

std::optional<double> seconds_of_an_item(const TimedClaims& claims) {
  std::int64_t items = 0;
  double seconds = 0.0;
  for (const std::vector<TimedPiece>& claim : claims) {
    items += items_of(claim);
    for (const TimedPiece& piece : claim) seconds += piece.seconds;
  }
  return items > 0 ? std::optional(seconds / static_cast<double>(items)) : std::nullopt;
}

/// The entry of the size that takes the least time.
auto best_of(const auto& ratios) {
  return std::ranges::min_element(ratios, {}, [](const auto& entry) { return entry.second.first; });
}

}  // namespace

std::vector<std::pair<std::int64_t, std::int64_t>> in_pieces(std::int64_t begin, std::int64_t end, std::int64_t size) {
  const std::int64_t items = end - begin;
  const std::int64_t count =
      std::max<std::int64_t>(1, std::llround(static_cast<double>(items) / static_cast<double>(size)));
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (std::int64_t k = 0; k < count; ++k)
    pieces.emplace_back(begin + items * k / count, begin + items * (k + 1) / count);
  return pieces;
}

void SizeSearch::Compared::add(std::span<const double> sizes, const std::vector<TimedPiece>& claim, double usual) {
  if (largest == 0.0) largest = sizes.front();
  if (sizes.front() != largest) return;  // a correction, which says nothing about whole claims
  items += items_of(claim);
  const auto time = [&](std::size_t k) { return claim[k].seconds / static_cast<double>(claim[k].items); };
  first.push_back(std::log(time(0) / usual));
  for (std::size_t k = 0; k < sizes.size(); ++k) others[sizes[k]].push_back(std::log(time(k) / time(0)));
}

std::vector<std::pair<std::int64_t, std::int64_t>> SizeSearch::pieces(std::int64_t begin, std::int64_t end) const {
  if (!on_trial()) return size_ ? in_pieces(begin, end, *size_) : std::vector{std::pair(begin, end)};
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (const std::int64_t size : cuts(end - begin)) {
    pieces.emplace_back(begin, begin + size);
    begin += size;
  }
  if (begin < end) pieces.emplace_back(begin, end);
  return pieces;
}

/// The sizes of the first pieces of a claim on trial. None: the claim is whole, or too small to be cut.
std::vector<std::int64_t> SizeSearch::cuts(std::int64_t items) const {
  std::vector<std::int64_t> sizes;
  std::int64_t left = items;
  for (const std::int64_t size : trials_.front()) {
    if (2 * size > items + 1 || size > left) continue;
    sizes.push_back(size);
    left -= size;
  }
  return sizes;
}

void SizeSearch::add(const std::vector<TimedClaims>& devices) {
  if (trials_.empty() && rest_ > 1) {
    --rest_;
    return;
  }
  Usual usual;
  for (const TimedClaims& claims : devices) usual.push_back(seconds_of_an_item(claims));
  if (*std::ranges::max_element(usual) == std::nullopt) return;  // nobody ran anything
  if (trials_.empty()) return begin(devices, usual);
  if (turn_ % 2 == 0) {
    tried_ = devices;
  } else {
    if (turn_ > 1) compare(usual);  // the first one warms up
    before_ = usual;
  }
  ++turn_;
  const std::int64_t pairs = turn_ / 2 - 1;
  if (turn_ % 2 == 0 && pairs >= kPairs && (pairs >= kMostPairs || is_certain())) end_trial();
}

void SizeSearch::begin(const std::vector<TimedClaims>& devices, const Usual& usual) {
  std::int64_t largest = 0;
  for (const TimedClaims& claims : devices) {
    for (const std::vector<TimedPiece>& claim : claims) largest = std::max(largest, items_of(claim));
  }
  const double slowest = std::ranges::max_element(usual)->value();
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = (largest + 1) / 2;
       size > 1 && static_cast<double>(size) * slowest >= kLeastSeconds && sizes.size() < kMostSizes;
       size = (size + 1) / 2) {
    sizes.push_back(size);
  }
  if (!sizes.empty()) trials_.push_back(std::move(sizes));
  if (size_) trials_.emplace_back();
  found_.clear();
  start(devices.size());
}

void SizeSearch::start(std::size_t devices) {
  turn_ = 0;
  compared_.assign(devices, {});
  if (trials_.empty()) rest_ = kNextSearch;
}

void SizeSearch::compare(const Usual& usual) {
  for (std::size_t d = 0; d < compared_.size(); ++d) {
    if (before_[d].value_or(0.0) <= 0.0 || usual[d].value_or(0.0) <= 0.0) continue;
    for (const std::vector<TimedPiece>& claim : tried_[d]) {
      const std::int64_t items = items_of(claim);
      const std::vector<std::int64_t> cut = cuts(items);
      std::vector<double> sizes(cut.begin(), cut.end());
      // Claims that are too small to be cut are corrections. They say nothing about whole claims.
      if (trials_.front().empty() && in_pieces(0, items, *size_).size() > 1) sizes = {kWhole};
      const bool timed =
          std::all_of(claim.begin(), claim.end(), [](const TimedPiece& piece) { return piece.seconds > 0.0; });
      if (!sizes.empty() && timed) compared_[d].add(sizes, claim, std::sqrt(*before_[d] * *usual[d]));
    }
  }
}

/// By size: the mean over the devices, weighted by the items that they ran.
std::map<double, SizeSearch::Ratio> SizeSearch::result() const {
  std::map<double, Ratio> sums;
  std::map<double, double> items;
  for (const Compared& one : compared_) {
    for (const auto& [size, values] : one.others) items[size] += static_cast<double>(one.items);
  }
  for (const Compared& one : compared_) {
    for (const auto& [size, values] : one.others) {
      const double weight = static_cast<double>(one.items) / items[size];
      auto& [ratio, variance] = sums[size];
      ratio += weight * (plan::median(one.first) + plan::median(values));
      variance += weight * weight * (variance_of_median(one.first) + variance_of_median(values));
    }
  }
  for (auto& [size, sum] : sums) sum.second = std::sqrt(sum.second);
  return sums;
}

/// Whether it is certain that the fastest size so far is fast enough, or that it is not.
bool SizeSearch::is_certain() const {
  const std::map<double, Ratio> known = result();
  const Ratio best = known.empty() ? Ratio{0.0, 0.0} : best_of(known)->second;
  return std::abs(best.first - std::log(kGain)) > kSearchErrors * best.second;
}

/// The first trial has ended.
void SizeSearch::end_trial() {
  for (const auto& [size, ratio] : result()) found_[size] = ratio;
  trials_.erase(trials_.begin());
  if (trials_.empty() && !found_.empty()) {
    const Ratio best = best_of(found_)->second;
    if (best.first + best.second <= std::log(kGain)) {
      const auto taken = std::find_if(found_.rbegin(), found_.rend(), [&](const auto& entry) {
        return entry.second.first <= best.first + std::log(kAlikeSizes);
      });
      size_ = taken->first == kWhole ? std::nullopt : std::optional(static_cast<std::int64_t>(taken->first));
      gain_ = std::exp(-taken->second.first);
    }
  }
  start(compared_.size());
}

}  // namespace paceline::balance
