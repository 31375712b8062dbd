// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// How the shares of one step are handed out. Each device first gets a chunk of its share. The rest is held back in a
/// common pool, from which the devices that finish first take corrections.
struct HoldBackPlan {
  std::vector<std::int64_t> first_chunks;  ///< per device, at most its share
  std::int64_t pool = 0;                   ///< items held back: the sum of the shares minus the sum of the chunks
  std::int64_t floor = 1;                  ///< smallest correction
};

/// Decides how much to hold back for corrections, if anything.
///
/// A correction costs the fixed time of a micro-batch. It saves time when devices would finish far apart. noise[d] is
/// the relative standard deviation of device d's time, so its finish deviates by s_d = noise[d] * seconds(share). Of
/// two devices the later one finishes sqrt((s_a^2 + s_b^2) / (2 pi)) seconds after their mean, on average. Of more
/// devices the last one finishes at least that much after the mean of the two noisiest. If this is less than the mean
/// fixed time of one more micro-batch per device, nothing is held back: on a quiet machine a share is one micro-batch.
/// Otherwise each device holds back `margin` standard deviations of its own share, so that others have already taken
/// the surplus of a device that finishes late. In factoring, too, the held-back part grows with the variance (Hummel,
/// Schonberg & Flynn 1992). `models` and `noise` may be empty if nothing was measured yet; then nothing is held back.
PACELINE_API HoldBackPlan plan_hold_back(std::span<const std::int64_t> shares, std::span<const CostModel> models,
                                         std::span<const double> noise, std::int64_t granularity = 1,
                                         double margin = 1.0);

}  // namespace paceline::plan
