// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include <paceline/sim/day.hpp>

#include "refuse.hpp"

namespace paceline::sim {

constexpr double kEndless = std::numeric_limits<double>::infinity();
constexpr double kMinute = 60.0;

struct DayJob {
  double arrival = 0.0;
  double work = 0.0;           // seconds at speed 1
  double deadline = kEndless;  // seconds from the arrival
};

/// The device-hours of the best plan that knows all jobs. A state is how many devices of each speed are active.
class Hindsight {
 public:
  Hindsight(const DayOptions& options, const std::vector<DayJob>& jobs) : options_(options), jobs_(jobs) {
    std::map<double, int, std::greater<>> classes;
    for (const double speed : options.speeds) ++classes[speed];
    states_.emplace_back();
    for (const auto& [speed, count] : classes) {
      speeds_.push_back(speed);
      std::vector<std::vector<int>> longer;
      for (const std::vector<int>& state : states_) {
        for (int n = 0; n <= count; ++n) {
          longer.push_back(state);
          longer.back().push_back(n);
        }
      }
      states_ = std::move(longer);
    }
    require(states_.size() <= kMostStates,
            "these speeds can be active in {} ways, at most {} are compared: use fewer "
            "different speeds",
            states_.size(), kMostStates);
    for (std::size_t s = 0; s < states_.size(); ++s) number_[states_[s]] = s;
  }

  double hours() {
    const std::size_t all = states_.size();
    std::vector<double> least(all, 0.0);  // device-seconds up to a minute that ends in this state
    std::size_t first = 0;
    const auto minutes = static_cast<std::size_t>(std::ceil(options_.hours * 60.0));
    for (std::size_t m = 0; m < minutes; ++m) {
      std::size_t last = first;
      while (last < jobs_.size() && jobs_[last].arrival < kMinute * static_cast<double>(m + 1)) ++last;
      const std::vector<bool> enough = feasible(first, last, kMinute * static_cast<double>(m));
      std::vector<double> next(all, kEndless);
      for (std::size_t to = 0; to < all; ++to) {
        if (!enough[to]) continue;
        for (std::size_t from = 0; from < all; ++from) {
          if (least[from] == kEndless) continue;
          const double activations = m == 0 ? 0.0 : options_.activation_seconds * added(from, to);
          next[to] = std::min(next[to], least[from] + activations + kMinute * count(to));
        }
      }
      least = std::move(next);
      first = last;
    }
    return *std::min_element(least.begin(), least.end()) / 3600.0;
  }

 private:
  static constexpr std::size_t kMostStates = 512;

  [[nodiscard]] double count(std::size_t state) const {
    return std::accumulate(states_[state].begin(), states_[state].end(), 0);
  }
  [[nodiscard]] double added(std::size_t from, std::size_t to) const {
    double devices = 0.0;
    for (std::size_t c = 0; c < speeds_.size(); ++c) devices += std::max(0, states_[to][c] - states_[from][c]);
    return devices;
  }

  // Which states meet the target in the minute; all devices always count as if they did. Fewer devices than some that
  // do not are not tried.
  std::vector<bool> feasible(std::size_t first, std::size_t last, double begin) {
    std::vector<bool> enough(states_.size());
    enough.back() = true;
    for (std::size_t s = states_.size() - 1; s-- > 0;) {
      std::vector<int> larger = states_[s];
      bool may = true;
      for (std::size_t c = 0; c < larger.size() && may; ++c) {
        ++larger[c];
        const auto found = number_.find(larger);
        may = found == number_.end() || enough[found->second];
        --larger[c];
      }
      enough[s] = may && meets(states_[s], first, last, begin);
    }
    return enough;
  }

  // First come, first served, on the fastest device that is free, or else on the one that is free first.
  bool meets(const std::vector<int>& state, std::size_t first, std::size_t last, double begin) {
    free_.clear();
    for (std::size_t c = 0; c < speeds_.size(); ++c) {
      for (int n = 0; n < state[c]; ++n) free_.emplace_back(begin, speeds_[c]);
    }
    if (free_.empty()) return first == last;
    double left = options_.scale.wait_seconds * static_cast<double>(last - first);
    for (std::size_t j = first; j < last; ++j) {
      const double arrival = jobs_[j].arrival;
      std::size_t best = 0;
      for (std::size_t d = 0; d < free_.size(); ++d) {
        if (free_[d].first <= arrival) {
          best = d;
          break;
        }
        if (free_[d].first < free_[best].first) best = d;
      }
      const double start = std::max(arrival, free_[best].first);
      left -= start - arrival;
      if (left < 0.0) return false;
      free_[best].first = start + jobs_[j].work / free_[best].second;
    }
    return true;
  }

  const DayOptions& options_;
  const std::vector<DayJob>& jobs_;
  std::vector<double> speeds_;            // of the classes, the fastest first
  std::vector<std::vector<int>> states_;  // the last one has all devices
  std::map<std::vector<int>, std::size_t> number_;
  std::vector<std::pair<double, double>> free_;  // when each device is free, and its speed
};

}  // namespace paceline::sim
