// SPDX-License-Identifier: Apache-2.0
#include <paceline/observe/metrics.hpp>

#include <algorithm>
#include <utility>

namespace paceline::observe {

MetricsRecorder::MetricsRecorder(std::vector<std::string> device_names) {
  for (std::string& name : device_names) {
    DeviceMetrics device;
    device.name = std::move(name);
    total_.devices.push_back(std::move(device));
  }
}

void MetricsRecorder::add(const StepSample& sample) {
  const std::lock_guard lock(mutex_);
  for (std::size_t d = 0; d < total_.devices.size(); ++d) {
    DeviceMetrics& device = total_.devices[d];
    device.items += sample.items[d];
    device.last_items = sample.items[d];
    if (!sample.costs.empty()) device.cost += sample.costs[d];
    device.busy_seconds += sample.busy_seconds[d];
    device.idle_seconds += std::max(0.0, sample.compute_seconds - sample.busy_seconds[d]);
  }
  if (window_.size() < kWindow) {
    window_.push_back(sample);
  } else {
    window_[static_cast<std::size_t>(total_.steps) % kWindow] = sample;
  }
  ++total_.steps;
  total_.moves += sample.moved ? 1 : 0;
  total_.compute_seconds += sample.compute_seconds;
  total_.step_seconds += sample.step_seconds;
  const auto bound = std::lower_bound(kStepBounds.begin(), kStepBounds.end(), sample.step_seconds);
  ++total_.step_counts[static_cast<std::size_t>(bound - kStepBounds.begin())];
}

void MetricsRecorder::set_retired(std::size_t device, bool retired) {
  const std::lock_guard lock(mutex_);
  total_.devices[device].retired = retired;
}

Metrics MetricsRecorder::snapshot() const {
  const std::lock_guard lock(mutex_);
  Metrics metrics = total_;
  double busiest = 0.0;
  double sum = 0.0;
  double working = 0.0;
  const bool by_cost =
      std::none_of(window_.begin(), window_.end(), [](const StepSample& sample) { return sample.costs.empty(); });
  for (std::size_t d = 0; d < metrics.devices.size(); ++d) {
    double busy = 0.0;
    double items = 0.0;
    double cost = 0.0;
    for (const StepSample& sample : window_) {
      busy += sample.busy_seconds[d];
      items += static_cast<double>(sample.items[d]);
      if (by_cost) cost += sample.costs[d];
    }
    metrics.devices[d].items_per_second = busy > 0.0 ? items / busy : 0.0;
    metrics.devices[d].cost_per_second = busy > 0.0 ? cost / busy : 0.0;
    busiest = std::max(busiest, busy);
    sum += busy;
    working += items > 0.0 ? 1.0 : 0.0;
  }
  if (sum > 0.0) metrics.imbalance = busiest * working / sum - 1.0;
  return metrics;
}

}  // namespace paceline::observe
