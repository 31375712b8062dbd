// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "plan/pool/job_slots.hpp"

namespace paceline::plan {

/// Devices that can run a job: active ones, or also released ones, which come back when somebody wants them.
struct PoolWay {
  double activation = 0.0;         // seconds, of the last one that comes
  double counted_since = -kNever;  // since when jobs need all of them
  double seconds = 0.0;            // of the job there, with the load of the model

  /// When they are there, if they are wanted at this time, or have been since before.
  [[nodiscard]] double ready(double wanted) const { return std::min(wanted, counted_since) + activation; }
  /// When the job must start there, or, if it needs them and nobody does yet, must want them.
  [[nodiscard]] double last_start(double deadline, double margin) const {
    const double latest = deadline - margin * seconds;
    return ready(kNever) <= latest ? latest : latest - activation;
  }
};

}  // namespace paceline::plan
