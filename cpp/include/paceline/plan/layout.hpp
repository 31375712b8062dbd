// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/plan/stages.hpp>

namespace paceline::plan {

/// How a model can be laid out on the devices of one machine.
enum class LayoutKind : std::uint8_t {
  data_parallel,  ///< the whole model on every device that takes part, with uneven shares of the batch
  pipeline,       ///< one pipeline of stages
  replicas,       ///< pipelines over disjoint sets of devices, with uneven numbers of micro-batches
};
/// "data parallel", "pipeline", "replicas of pipelines"
[[nodiscard]] PACELINE_API std::string_view name_of(LayoutKind kind);

struct LayoutOptions {
  /// For the pipelines. `cuts`, `order` and `previous_*` are not used. `micro_batches` are those of a whole step.
  StageOptions stages{};
  /// Which part of a reduction runs while devices still compute, and so takes no time: between 0 and 1.
  double overlap = 0.0;
};

/// One way, with its predicted step.
struct Layout {
  LayoutKind kind = LayoutKind::data_parallel;
  bool fits = false;                  ///< if not, `reason` says what is missing, and the rest is empty
  double seconds = 0.0;               ///< of a step: computing, and what is exposed of the reduction
  double reduction_seconds = 0.0;     ///< the exposed part
  double bubble = 0.0;                ///< the part of the computing time in which the devices that take part are idle
  std::vector<std::int64_t> bytes{};  ///< per device of the problem; 0: it takes no part
  std::vector<std::int64_t>
      items{};  ///< per device of the problem: its share of the batch (in a pipeline: the pipeline's)
  std::vector<StagePlan> pipelines{};  ///< one or several, with the numbers of the problem's devices
  std::string reason{};                ///< one sentence with the numbers that decide
};

/// Ranks all ways of laying out a model by the predicted step, those that fit first, the best first. Within 1 % of the
/// best the simplest comes first: data parallel, then a pipeline, replicas.
///
/// - Data parallel: each device takes its share in as few micro-batches as its memory allows. Shares are exact: each
///   item goes to the device that would finish it first (Ibaraki & Katoh, Resource Allocation Problems, 1988). The
///   reduction over N memory spaces takes 2 (N - 1) / N * gradient bytes over the link. Up to 8 devices every subset is
///   tried, since fewer devices reduce less; beyond, the k fastest for each k.
/// - Replicas: up to 8 devices, the best pipeline of every subset, then all set partitions, with the same exact rule
/// for
///   numbers of micro-batches, because the time of a pipeline does not decrease with them. A block's gradient is
///   reduced among the pipelines; every device reduces its own stage.
///
/// @throws InvalidArgument as plan_stages(), and for an overlap outside of 0 to 1. What does not fit is no error.
[[nodiscard]] PACELINE_API std::vector<Layout> plan_layouts(const StageProblem& problem,
                                                            const LayoutOptions& options = {});

}  // namespace paceline::plan
