// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <paceline/plan/stages.hpp>

namespace paceline::plan {

/// Where a model is cut and which devices the stages are on.
struct Partition {
  std::vector<std::size_t> cuts;   ///< the first block of each stage
  std::vector<std::size_t> order;  ///< the device of each stage

  [[nodiscard]] std::size_t stages() const { return cuts.size(); }
  /// The end of a stage of a model with so many blocks.
  [[nodiscard]] std::size_t end(std::size_t stage, std::size_t blocks) const {
    return stage + 1 < cuts.size() ? cuts[stage + 1] : blocks;
  }
  friend auto operator<=>(const Partition&, const Partition&) = default;
};

/// The sizes of `count` micro-batches of a batch. They differ by at most one; the larger ones come first.
struct BatchSizes {
  BatchSizes(std::int64_t batch_size, std::int64_t micro_batches);
  std::int64_t count = 1;
  std::int64_t larger = 1;
  std::int64_t larger_count = 1;
  std::int64_t smaller = 1;
};

/// What stages of a checked problem cost, in constant time each.
class StageCosts {
 public:
  /// @throws InvalidArgument for numbers that make no sense
  explicit StageCosts(const StageProblem& problem);

  [[nodiscard]] const StageProblem& problem() const { return problem_; }
  [[nodiscard]] std::size_t blocks() const { return problem_.blocks.size(); }
  [[nodiscard]] std::size_t devices() const { return problem_.devices.size(); }

  [[nodiscard]] double forward(std::size_t from, std::size_t to, std::size_t device, double items) const {
    return seconds(forward_, from, to, device, items, 1.0);
  }
  [[nodiscard]] double backward(std::size_t from, std::size_t to, std::size_t device, double items) const {
    return seconds(backward_, from, to, device, items, 1.0);
  }
  /// What `runs` micro-batches with `items` in all take on a device, forward and backward.
  [[nodiscard]] double work(std::size_t from, std::size_t to, std::size_t device, double items, double runs) const {
    return seconds(both_, from, to, device, items, runs);
  }
  /// Seconds from one device to another for the input of a block.
  [[nodiscard]] double send(std::size_t block, std::size_t source, std::size_t target, std::int64_t items) const;
  [[nodiscard]] bool same_space(std::size_t a, std::size_t b) const {
    return problem_.devices[a].memory_space == problem_.devices[b].memory_space;
  }

  /// Devices of one class are exchangeable: equal, and alone in their memory spaces or all in one.
  [[nodiscard]] std::size_t device_class(std::size_t device) const { return classes_[device]; }

  /// Bytes of a stage that do not depend on how many micro-batches are in flight; INT64_MAX if they exceed it.
  [[nodiscard]] std::int64_t fixed_bytes(std::size_t from, std::size_t to, std::int64_t items) const;
  /// Bytes of a stage per micro-batch in flight; INT64_MAX if they exceed it.
  [[nodiscard]] std::int64_t flight_bytes(std::size_t from, std::size_t to, std::int64_t items) const;
  /// What the last stage need not hold because the first one does.
  [[nodiscard]] std::int64_t tied_bytes(std::size_t first_device, std::size_t last_device) const;

  /// Parameter bytes that are in another memory space than with `previous`; its devices may be gone.
  [[nodiscard]] std::int64_t moved_bytes(const Partition& partition, const Partition& previous) const;

 private:
  struct Seconds {
    double fixed = 0.0;
    double per_item = 0.0;
  };
  [[nodiscard]] double seconds(const std::vector<Seconds>& sums, std::size_t from, std::size_t to, std::size_t device,
                               double items, double runs) const {
    return ((sums[to].fixed - sums[from].fixed) * runs + (sums[to].per_item - sums[from].per_item) * items) /
           problem_.devices[device].speed;
  }

  StageProblem problem_;
  std::vector<std::size_t> classes_;  // the first device of the same class
  // Sums over the blocks before the index.
  std::vector<Seconds> forward_, backward_, both_;
  std::vector<std::int64_t> parameters_, saved_;
  std::vector<std::vector<std::int64_t>> workspace_;  // [j][i]: the most of blocks i to i + 2^j
};

/// Sets `times` to those of the stages of a partition for micro-batches of `items`.
void stage_times(const StageCosts& costs, const Partition& partition, std::int64_t items,
                 std::vector<StageTimes>& times);
/// Bytes of each stage with so many micro-batches in flight.
[[nodiscard]] std::vector<std::int64_t> stage_bytes(const StageCosts& costs, const Partition& partition,
                                                    std::int64_t items, std::span<const std::int64_t> in_flight);
/// A time that no schedule of this library beats, for micro-batches of two sizes.
[[nodiscard]] double stage_bound(const StageCosts& costs, const Partition& partition, const BatchSizes& sizes);

/// The plan of a partition with a schedule. @throws OutOfMemory if a stage does not fit its device
[[nodiscard]] StagePlan stage_plan(const StageCosts& costs, const Partition& partition, const Schedule& schedule);

/// For messages.
[[nodiscard]] std::string device_name(const StageProblem& problem, std::size_t device);

/// @throws InvalidArgument for cuts or devices that are not there
void check_cuts(const StageCosts& costs, std::span<const std::size_t> cuts, const char* name);
void check_order(const StageCosts& costs, std::span<const std::size_t> order, const char* name);

}  // namespace paceline::plan
