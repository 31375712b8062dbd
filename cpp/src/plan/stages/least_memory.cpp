// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include <paceline/error.hpp>

#include "plan/numbers.hpp"
#include "plan/stages/stage_search.hpp"
#include "plan/stages/subset_program.hpp"
#include "plural.hpp"

namespace paceline::plan {
namespace {

// The program that keeps all blocks takes milliseconds for so many sets times blocks squared.
constexpr std::size_t kExactSteps = 8'000'000;

/// The partition that fits with the least that every device would need on top of its memory.
class LeastMemory {
 public:
  LeastMemory(const StageCosts& costs, const StageOptions& options)
      : costs_(costs),
        options_(options),
        sets_(costs, options.order, kMostSets),
        exact_(sets_.count() * costs.blocks() * costs.blocks() <= kExactSteps) {}

  [[nodiscard]] std::optional<Partition> find(std::int64_t micro_batches, std::int64_t depth,
                                              std::int64_t extra) const {
    return SubsetProgram(costs_, options_, sets_)
        .find({BatchSizes(costs_.problem().batch_size, micro_batches), {depth, 0}, kInfinity, extra}, exact_);
  }

  /// The least bytes that every device would need more, to one part in a thousand or 1 byte.
  [[nodiscard]] std::int64_t least_extra(std::int64_t micro_batches, std::int64_t depth) const {
    std::int64_t low = 0;
    std::int64_t high = 1;
    while (high < kMostInt64 && !find(micro_batches, depth, high)) {
      low = high;
      high = saturating_multiply(high, 2);
    }
    while (high - low > 1 + low / 1000) {
      const std::int64_t middle = low + (high - low) / 2;
      (find(micro_batches, depth, middle) ? high : low) = middle;
    }
    return high;
  }

 private:
  const StageCosts& costs_;
  const StageOptions& options_;
  DeviceSets sets_;
  bool exact_;
};

std::int64_t depth_of(const StageOptions& options, std::int64_t micro_batches) {
  return options.schedule == StageOptions::Kind::gpipe ? micro_batches : 1;
}

/// What would help that the caller can change in the options.
std::string cures(const StageCosts& costs, const StageOptions& options, std::int64_t micro_batches) {
  const std::int64_t batch = costs.problem().batch_size;
  std::string text;
  const auto add = [&](const std::string& cure) { text += (text.empty() ? "" : ", or ") + cure; };
  StageOptions free = options;
  free.schedule = StageOptions::Kind::automatic;
  if (options.schedule == StageOptions::Kind::gpipe && LeastMemory(costs, free).find(micro_batches, 1, 0))
    add("use 1F1B, which keeps fewer micro-batches in flight than GPipe");
  if (micro_batches < batch && LeastMemory(costs, options).find(batch, depth_of(options, batch), 0))
    add(fmt::format("make micro-batches smaller: {} of 1 item fit", batch));
  free.cuts.clear();
  free.order.clear();
  if ((!options.cuts.empty() || !options.order.empty()) && LeastMemory(costs, free).find(micro_batches, 1, 0))
    add("leave cuts and order to the planner");
  if (text.empty()) add("checkpoint activations inside the blocks, add devices, or raise the memory limits");
  return text;
}

}  // namespace

void try_least_memory(const StageSearch& search, std::int64_t micro_batches) {
  const std::int64_t depth = depth_of(search.options, micro_batches);
  if (const std::optional<Partition> found = LeastMemory(search.costs, search.options).find(micro_batches, depth, 0))
    (void)search.offer(*found, micro_batches, kInfinity);
}

void refuse_memory(const StageCosts& costs, const StageOptions& options) {
  const StageProblem& problem = costs.problem();
  const std::int64_t micro_batches = options.micro_batches.value_or(problem.batch_size);
  const std::int64_t depth = depth_of(options, micro_batches);
  const BatchSizes sizes(problem.batch_size, micro_batches);
  const LeastMemory memory(costs, options);
  const std::optional<Partition> closest = memory.find(micro_batches, depth, memory.least_extra(micro_batches, depth));
  if (!closest) throw OutOfMemory("no plan fits: the bytes of a block with one micro-batch do not fit 63 bits");
  // The stage that lacks most.
  const std::vector<std::int64_t> in_flight(closest->stages(), depth);
  const std::vector<std::int64_t> bytes = stage_bytes(costs, *closest, sizes.larger, in_flight);
  const auto lack = [&](std::size_t i) { return bytes[i] - problem.devices[closest->order[i]].memory_bytes; };
  std::size_t worst = 0;
  for (std::size_t i = 1; i < bytes.size(); ++i)
    if (lack(i) > lack(worst)) worst = i;
  const std::size_t device = closest->order[worst];
  const std::size_t to = worst + 1 < bytes.size() ? closest->cuts[worst + 1] : costs.blocks();
  const std::string name = device_name(problem, device);
  throw OutOfMemory(
      fmt::format("no plan fits: even the closest one needs {} bytes on {}, which has {}, for blocks {} to {} with {} "
                  "of {} in flight; {}",
                  bytes[worst], name, problem.devices[device].memory_bytes, closest->cuts[worst], to - 1,
                  plural(depth, "micro-batch", "micro-batches"), plural(sizes.larger, "item"),
                  cures(costs, options, micro_batches)),
      name);
}

}  // namespace paceline::plan
