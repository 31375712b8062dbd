// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace paceline::balance {

/// A device that is not there yet: like one that was measured, but `speed` times as fast.
struct AddedDevice {
  std::string name;
  std::size_t like = 0;
  double speed = 1.0;
};

/// What is asked: a change of the devices, judged by the present estimates.
struct WhatIfOptions {
  std::vector<double> speeds = {};       ///< one factor per device on its present speed, or none: as they are
  std::vector<AddedDevice> add = {};     ///< come after the present devices
  std::vector<std::size_t> remove = {};  ///< devices that would get no work
  std::int64_t batch_size = 0;           ///< 0: the usual one (see BalanceReport)
  /// The time that a device takes when it works alone, over the time that it takes beside all others: below 1 where
  /// devices hinder each other (caches, memory, Python's lock). With some of the devices removed the factor lies
  /// between this and 1. None: it was not measured; devices are taken to be as fast alone, and the text says so.
  std::optional<double> alone = {};
  /// From one step to the next beside the devices' work and the reduction: part of all seconds.
  double overhead_seconds = 0.0;
};

/// The split that would be best then, and how long a step would take: the slowest device's work by the estimates, the
/// reduction, what recent steps of several devices took beyond their prediction (in parts of it), and the overhead.
struct WhatIfAnswer {
  std::vector<std::string> names;    ///< the present devices, then those added
  std::vector<std::int64_t> shares;  ///< per name; 0 for those removed
  double seconds = 0.0;              ///< of a step with these shares
  double present_seconds = 0.0;      ///< of a step with the shares now in force and the devices as they are
  double best_seconds = 0.0;         ///< of a step with the best shares for the devices as they are
  double error = 0.0;                ///< relative standard error of `seconds`: of the device that finishes last
  std::string text;                  ///< one sentence
};

}  // namespace paceline::balance
