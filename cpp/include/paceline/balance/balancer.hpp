// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::balance {

/// A device as the balancer sees it. Devices of one class share the shape of their cost model.
struct DeviceProfile {
  std::string name;           ///< "host:0"
  std::string device_class;   ///< "host"; devices of one class are equal until measured otherwise
  plan::ShareLimits limits;
};

struct BalancerOptions {
  std::vector<DeviceProfile> devices;
  std::string policy = "auto";    ///< "auto" | "even" | "weighted"
  std::vector<double> weights;    ///< for "weighted": one per device
  std::int64_t granularity = 1;
  std::vector<double> reduction_seconds;   ///< as in plan::SplitOptions
};

/// One micro-batch that ran.
struct MicroBatchTiming {
  std::int64_t items = 0;
  double seconds = 0.0;     ///< compute only, by the device's own clock
  bool excluded = false;    ///< first run of a size, compilation: counted as work, not as evidence
  friend bool operator==(const MicroBatchTiming&, const MicroBatchTiming&) = default;
};

/// What one step measured: one list per device, empty where a device had no work.
struct StepTimings {
  std::vector<std::vector<MicroBatchTiming>> devices;
  double step_seconds = 0.0;   ///< first start to last finish of the compute
};

/// What to run next, and the numbers behind it.
struct StepPlan {
  std::int64_t step = 0;
  std::int64_t batch_size = 0;
  std::vector<std::int64_t> shares;
  std::vector<plan::CostModel> models;    ///< the present estimate per device; empty before the first timing
  std::vector<double> noise;              ///< relative standard deviation of one micro-batch, per device
  bool moved = false;                     ///< shares differ from the last plan's for the same batch size
  double predicted_seconds = 0.0;         ///< makespan by `models`; 0 before the first timing
  std::string reason;                     ///< one sentence
};

/// The closed loop: timings in, plans out. Every plan is a pure function of the options and of the calls
/// made so far (batch sizes asked, timings recorded): no clock, no random numbers, no thread. A ledger of the calls replays to the same
/// plans. Not thread-safe; one thread at a time.
class PACELINE_API Balancer {
 public:
  explicit Balancer(BalancerOptions options);
  ~Balancer();
  Balancer(Balancer&&) noexcept;
  Balancer& operator=(Balancer&&) noexcept;

  /// The plan of the next step. Shares sum to `batch_size`.
  StepPlan next_plan(std::int64_t batch_size);

  /// The timings of the plan that next_plan last returned. A step that failed is never recorded.
  void record(const StepTimings& timings);

  [[nodiscard]] const BalancerOptions& options() const noexcept;

  /// In words: what was seen, what was decided and why, what a move would gain.
  [[nodiscard]] std::string explain() const;

  /// Changes of shares so far, for unchanged batch sizes.
  [[nodiscard]] std::int64_t move_count() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace paceline::balance
