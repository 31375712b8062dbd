// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/sim/pool.hpp>

namespace paceline::sim {

inline SimulatedWaits waits_of(std::vector<double> seconds) {
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  return {.p50_seconds = seconds[seconds.size() / 2],
          .p99_seconds = seconds[seconds.size() * 99 / 100],
          .mean_seconds = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size())};
}

/// What tenants were served, and how far two of them got apart while both waited. It decides nothing.
class Fairness {
 public:
  explicit Fairness(const PoolSimulationOptions& options) : tenants_(options.tenants.size()), pairs_(tenants_.size()) {
    for (std::size_t t = 0; t < tenants_.size(); ++t) {
      tenants_[t].weight = options.tenants[t].weight;
      pairs_[t].resize(t);
    }
  }

  /// So many more requests of a tenant wait. Tenants count from 1; 0: nobody has a name.
  void waits(std::size_t tenant, std::int64_t more) {
    if (tenant > 0) tenants_[tenant - 1].waiting += more;
  }
  void waited(std::size_t tenant, double seconds) {
    if (tenant > 0) tenants_[tenant - 1].waits.push_back(seconds);
  }
  /// These start together: a tenant and a charge each.
  void starts(const std::vector<std::pair<std::size_t, double>>& charges) {
    if (tenants_.empty()) return;
    note();  // what came since the last start, or has begun to wait
    const bool all_wait =
        std::all_of(tenants_.begin(), tenants_.end(), [](const Tenant& one) { return one.waiting > 0; });
    for (const auto& [tenant, charge] : charges) {
      Tenant& one = tenants_[tenant - 1];
      --one.waiting;
      one.served += charge;
      one.served_while_all_wait += all_wait ? charge : 0.0;
      one.largest = std::max(one.largest, charge);
    }
    note();
  }

  void tell(PoolSimulationResult& result) {
    double served = 0.0;
    double while_all_wait = 0.0;
    for (const Tenant& one : tenants_) {
      served += one.served;
      while_all_wait += one.served_while_all_wait;
    }
    const auto part = [](double value, double of) { return of > 0.0 ? value / of : 0.0; };
    for (std::size_t a = 0; a < tenants_.size(); ++a) {
      Tenant& one = tenants_[a];
      SimulatedTenantResult& told = result.tenants.emplace_back();
      told.served = part(one.served, served);
      told.served_while_all_wait = part(one.served_while_all_wait, while_all_wait);
      told.largest_charge = one.largest;
      const SimulatedWaits waits = waits_of(std::move(one.waits));
      told.p50_wait_seconds = waits.p50_seconds;
      told.p99_wait_seconds = waits.p99_seconds;
      told.mean_wait_seconds = waits.mean_seconds;
      for (std::size_t b = 0; b < a; ++b) {
        if (!pairs_[a][b].compared) continue;
        const double bound = one.largest / one.weight + tenants_[b].largest / tenants_[b].weight;
        const double found = pairs_[a][b].apart / bound;
        result.unfairness = std::isnan(result.unfairness) ? found : std::max(result.unfairness, found);
      }
    }
  }

 private:
  struct Tenant {
    double weight = 1.0;
    std::int64_t waiting = 0;
    double served = 0.0;
    double served_while_all_wait = 0.0;
    double largest = 0.0;
    std::vector<double> waits = {};
  };
  struct Pair {
    std::optional<double> since = {};  // the difference of what they were served when both began to wait
    double apart = 0.0;                // the most
    bool compared = false;
  };

  void note() {
    for (std::size_t a = 0; a < tenants_.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        Pair& pair = pairs_[a][b];
        if (tenants_[a].waiting <= 0 || tenants_[b].waiting <= 0) {
          pair.since.reset();
          continue;
        }
        const double difference = tenants_[a].served / tenants_[a].weight - tenants_[b].served / tenants_[b].weight;
        if (!pair.since) pair.since = difference;
        pair.compared |= *pair.since != difference;
        pair.apart = std::max(pair.apart, std::abs(difference - *pair.since));
      }
    }
  }

  std::vector<Tenant> tenants_;
  std::vector<std::vector<Pair>> pairs_;  // of each one with those before it
};

}  // namespace paceline::sim
