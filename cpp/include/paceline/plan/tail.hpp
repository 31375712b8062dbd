// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>

namespace paceline::plan {

/// How the shares of one step are handed out: a planned chunk per device, the rest in a common pool from which
/// whoever comes first takes corrections.
struct TailPlan {
  std::vector<std::int64_t> first_chunks;  ///< per device, at most its share
  std::int64_t pool = 0;                   ///< items held back: sum of the shares minus sum of the chunks
  std::int64_t floor = 1;                  ///< smallest correction
};

/// Decides whether, and how much, to hold back for corrections.
///
/// A correction costs its fixed time; it recovers what devices finish apart. With noise[d] the relative standard
/// deviation of device d's time, its finish deviates by s_d = noise[d] * seconds(share). Of two devices the later one
/// finishes sqrt((s_a^2 + s_b^2) / (2 pi)) seconds after their mean, on average; of more at least so much after the two
/// noisiest. While that is below the mean fixed time of one more micro-batch per device nothing is held back: on a
/// quiet machine a share is one micro-batch. Otherwise each device holds back `margin` standard deviations of its own
/// share, so that the device which finishes late finds its surplus already taken, as in factoring (Hummel, Schonberg &
/// Flynn 1992), where the held-back part grows with the variance. `models` and `noise` may be empty (nothing measured
/// yet): then nothing is held back.
PACELINE_API TailPlan plan_tail(std::span<const std::int64_t> shares, std::span<const CostModel> models,
                                std::span<const double> noise, std::int64_t granularity = 1, double margin = 1.0);

}  // namespace paceline::plan
