// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <paceline/plan/cost_model.hpp>

namespace paceline::balance {

/// What part of its time in a step each device lends to other work, such as the requests of a pool.
///
/// Other work comes at a rate, so a device lends more in a longer step: with a part p lent, its items take 1 / (1 - p)
/// times as long. Fixed seconds for each step would be wrong as soon as the share changes.
///
/// The part is the mean of the last 16 steps, and its standard error goes into what a move must promise. A median would
/// jump between nothing and all as soon as other work comes in about half of the steps. Long jobs do not raise the mean
/// much, since the caller bounds each step's part. A load that begins is counted after 5 steps. One that ends is
/// forgotten in 16, and so is what a device without work once lent: it would not be measured again otherwise.
class LentTime {
 public:
  explicit LentTime(std::size_t devices) : devices_(devices) {}

  /// One step. `parts`: per device, in [0, 1], or empty: nothing was lent. `worked`: whether each device had work.
  void record(std::span<const double> parts, const std::vector<bool>& worked);

  /// 0 where it is too little to matter.
  [[nodiscard]] double part(std::size_t device) const { return devices_[device].part; }
  /// The relative standard error of the time that items take, because the part varies.
  [[nodiscard]] double error(std::size_t device) const { return devices_[device].error; }
  /// Whether a device lends time, or did so in its last step.
  [[nodiscard]] bool lends() const noexcept;
  /// It is retired.
  void forget(std::size_t device) { devices_[device] = {}; }
  /// How long items take beside other work. Without any: `model` to the bit.
  [[nodiscard]] plan::CostModel slowed(std::size_t device, const plan::CostModel& model) const;

 private:
  struct Device {
    double part = 0.0;
    double error = 0.0;
    std::vector<double> parts{};  // oldest first, from the first one above 0; empty again when all are 0
  };

  std::vector<Device> devices_;
};

}  // namespace paceline::balance
