// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/layout.hpp>

#include <fmt/format.h>

#include "plan/stages/layout_parts.hpp"
#include "plan/stages/stage_costs.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

constexpr double kEqual = 0.01;  // of a step: predictions are not better than that

}  // namespace

std::string_view name_of(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::pipeline:
      return "pipeline";
    case LayoutKind::replicas:
      return "replicas of pipelines";
    case LayoutKind::data_parallel:
      break;
  }
  return "data parallel";
}

std::int64_t gradient_bytes_of(const BlockCost& block) {
  return block.weight_bytes == 0 && block.gradient_bytes == 0 ? block.parameter_bytes / 4 : block.gradient_bytes;
}

double reduction_seconds(const LinkCost& link, std::size_t spaces, std::int64_t bytes) {
  const auto count = static_cast<double>(spaces);
  const double copies = link.bytes_per_second > 0.0
                            ? 2.0 * (count - 1.0) / count * static_cast<double>(bytes) / link.bytes_per_second
                            : 0.0;
  return 2.0 * (count - 1.0) * link.latency_seconds + copies;
}

std::size_t count_spaces(const StageProblem& problem, std::span<const std::size_t> devices) {
  std::set<std::size_t> spaces;
  for (const std::size_t device : devices) spaces.insert(problem.devices[device].memory_space);
  return spaces.size();
}

std::vector<Layout> plan_layouts(const StageProblem& problem, const LayoutOptions& options) {
  if (!(options.overlap >= 0.0 && options.overlap <= 1.0))
    refuse("overlap is {}: give the part of a reduction that is hidden, between 0 and 1", options.overlap);
  const StageCosts checked(problem);  // throws
  for (const BlockCost& block : problem.blocks) {
    if (block.weight_bytes >= 0 && block.gradient_bytes >= 0 &&
        block.weight_bytes + block.gradient_bytes <= block.parameter_bytes) {
      continue;
    }
    refuse(
        "a block has {} bytes of weights and {} of gradients, but {} bytes of both and "
        "of the optimizer's state together",
        block.weight_bytes, block.gradient_bytes, block.parameter_bytes);
  }
  std::vector<Layout> out = {data_parallel_layout(problem, options), pipeline_layout(problem, options)};
  out.push_back(replicas_layout(problem, options, out.back()));
  if (out[0].fits && out[1].fits) {
    out[0].reason += fmt::format(", the bubble of a pipeline {:.1f} %", 100.0 * out[1].bubble);
  }
  // The simplest ones stand first. Those as good as the best stay in this order.
  const auto seconds = [](const Layout& one) { return one.fits ? one.seconds : kInfinity; };
  const double best = seconds(*std::ranges::min_element(out, {}, seconds));
  std::ranges::stable_sort(
      out, {}, [&](const Layout& one) { return seconds(one) <= (1.0 + kEqual) * best ? best : seconds(one); });
  const Layout& first = out.front();
  if (!first.fits) return out;
  for (Layout& one : out) {
    if (&one == &first || !one.fits) continue;
    const double percent = 100.0 * (one.seconds / first.seconds - 1.0);
    one.reason += fmt::format("; {:.1f} % {} than {}", std::abs(percent), percent < 0.0 ? "shorter" : "longer",
                              name_of(first.kind));
  }
  return out;
}

}  // namespace paceline::plan
