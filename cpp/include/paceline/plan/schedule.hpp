// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::plan {

/// One thing that a stage of a pipeline does.
struct Action {
  enum class Kind : std::uint8_t { forward, backward };
  Kind kind = Kind::forward;
  std::int64_t micro_batch = 0;
  friend bool operator==(const Action&, const Action&) = default;
};

/// What each stage of a pipeline does, in order. It is a value: it is printed, saved, simulated, run and replayed.
struct Schedule {
  std::int64_t micro_batches = 0;
  std::vector<std::vector<Action>> stages;  ///< per stage, its actions in the order in which it runs them
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

/// All forwards, then all backwards. Every stage keeps all micro-batches in flight.
/// Backwards run in the order of the micro-batches, like forwards, so that gradients are summed in that order.
/// Source: Huang et al., GPipe, NeurIPS 2019.
/// @throws InvalidArgument unless there is at least one stage and one micro-batch.
[[nodiscard]] PACELINE_API Schedule gpipe(std::size_t stages, std::int64_t micro_batches);

/// Stage i of k first runs min(m, k - i + extra[i]) forwards; then it alternates one backward and one forward; then it
/// runs the backwards that are left. `extra` has the additional warm-up of each stage; empty: none. The in-flight count
/// of a stage is never less than that of the next one: an `extra` that would make it so is raised.
/// Source: Narayanan et al., PipeDream, SOSP 2019 (one forward, one backward); more warm-up hides links and noise.
/// @throws InvalidArgument unless there is at least one stage and one micro-batch, and for an `extra` of another size
/// or with a negative number.
[[nodiscard]] PACELINE_API Schedule one_f_one_b(std::size_t stages, std::int64_t micro_batches,
                                                std::span<const std::int64_t> extra = {});

/// One forward, one backward, with the most micro-batches in flight given for each stage: stage i first runs
/// min(m, depths[i]) forwards. gpipe() has m on every stage, one_f_one_b() k - i on stage i of k.
/// @throws InvalidArgument unless there is at least one stage and one micro-batch, and for a depth below 1 or above
/// that of the stage before, which could never start.
[[nodiscard]] PACELINE_API Schedule schedule_of_depths(std::span<const std::int64_t> depths,
                                                       std::int64_t micro_batches);

/// Forwards only, for predictions.
[[nodiscard]] PACELINE_API Schedule forward_only(std::size_t stages, std::int64_t micro_batches);

/// The most micro-batches that a stage has begun and not ended at one time: those whose saved activations it holds.
/// 0 if it runs no backward, since it saves nothing then.
[[nodiscard]] PACELINE_API std::int64_t in_flight(const Schedule& schedule, std::size_t stage);

/// @throws InvalidArgument naming stage and action, unless every stage runs the forward of each micro-batch once and
/// its backward once and later (or no stage runs any backward), and the stages never wait for each other in a circle.
PACELINE_API void check(const Schedule& schedule);

/// One line per stage: "F0 F1 B0 F2 B1 B2".
[[nodiscard]] PACELINE_API std::string to_text(const Schedule& schedule);
/// The schedule of such a text. @throws InvalidArgument for other text, naming line and word, and as check().
[[nodiscard]] PACELINE_API Schedule schedule_of(std::string_view text);

}  // namespace paceline::plan
