// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::balance {

/// What is known about one device: t(n) = scale * shape(n), the shape common to its class.
struct DeviceReport {
  std::string name;
  std::string device_class;
  bool retired = false;
  bool measured = false;       ///< false: it never ran anything that counts as evidence; the rest is then 0
  std::int64_t share = 0;      ///< of the last plan of the usual batch size
  double speed = 0.0;          ///< relative to the fastest of its class, in (0, 1]
  double noise = 0.0;          ///< relative standard deviation of one step's time
  double error = 0.0;          ///< relative standard error of the speed
  double fixed_seconds = 0.0;  ///< the estimate for n items: fixed + per_item * n
  double per_item_seconds = 0.0;
  double fixed_error = 0.0;  ///< standard error of the fixed part of the time at `reference_items`, as a fraction of it
  double reference_items = 0.0;
  double startup_seconds = 0.0;    ///< how much later than the first device it starts a step
  double lent_part = 0.0;          ///< of its time in a step that it lends to other work, which plans of "auto" count
  std::size_t equals = 0;          ///< devices of its class that it cannot be told from, itself included
  std::int64_t samples = 0;        ///< steps since the last change of its speed, at most the window
  std::int64_t since_step = 0;     ///< step of that change
  std::int64_t change_points = 0;  ///< sudden changes of its speed so far
  std::int64_t drifts = 0;         ///< slow ones
  /// Its time now over its time before the last change: 2 means twice as slow, 0 that there was no change. A device
  /// that was faster for a while and is now as fast as others of its class has not become slow. So among devices of a
  /// class that cannot be told apart, none has a larger slowdown than another.
  double slowdown = 0.0;
  double regain = 0.0;  ///< how much shorter steps would be if it were as fast as before, 0 if it is not slower
};

enum class MoveOutcome : std::uint8_t {
  pending,     ///< not enough steps yet
  kept,        ///< measured no worse than before, within the resolution
  taken_back,  ///< measured worse by more than the resolution
  overtaken,   ///< a speed changed or another move came before it could be judged
  unjudged,    ///< nothing comparable ran before it
};

/// One change of shares that promised a gain.
struct MoveReport {
  std::int64_t step = 0;
  std::int64_t batch_size = 0;
  std::vector<std::int64_t> from;
  std::vector<std::int64_t> to;
  double promised_gain = 0.0;  ///< 1 - predicted / present step time
  double measured_gain = 0.0;  ///< the same by the clock; 0 unless judged
  double resolution = 0.0;     ///< differences below it are noise; 0 unless judged
  MoveOutcome outcome = MoveOutcome::pending;
};

/// The batch size that most of these plans had, so the small last batch of an epoch is not it; of equals the largest.
/// That of the last plan if no size came twice, or in a quarter of them: a plan of another size would be an old one.
/// `batch_sizes`: the oldest first. @throws InvalidArgument if there are none
[[nodiscard]] PACELINE_API std::int64_t usual_batch_size(std::span<const std::int64_t> batch_sizes);

constexpr std::size_t kRecentPlans = 50;  ///< of which there is a usual batch size

/// The usual batch size is that of the last 50 plans (see usual_batch_size).
struct BalanceReport {
  std::string policy;
  std::string unit;        ///< what batches and shares count: "items", or as the options say
  std::int64_t steps = 0;  ///< recorded
  std::int64_t moves = 0;
  std::int64_t taken_back = 0;
  double possible_gain = 0.0;        ///< what the best split promises over the present one, for the usual batch size
  double required_gain = 0.0;        ///< what a move must promise at present ("auto"), else 0
  std::int64_t firm_until_step = 0;  ///< no move before this step because one was taken back; 0: none
  std::string last_reason;           ///< of the last plan of the usual batch size
  std::int64_t granularity = 1;      ///< of that plan
  std::vector<DeviceReport> devices;
  std::vector<MoveReport> recent_moves;  ///< at most the last 16, oldest first
};

}  // namespace paceline::balance
