// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/step.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/per_device.hpp>

#include "engine/rethrow.hpp"
#include "engine/step/step_pieces.hpp"
#include "engine/step/step_source.hpp"
#include "plural.hpp"

namespace paceline {

StepProgram::~StepProgram() = default;

namespace {

// Each item must be there exactly once. Otherwise gradients would be silently wrong.
void check_script(const StepOptions& options) {
  if (options.script.size() != options.shares.size()) {
    throw InvalidArgument(fmt::format("step: a script for {} in a group of {}; one list for each is needed.",
                                      plural(options.script.size(), "device"), options.shares.size()));
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const auto& list : options.script) {
    for (const MicroBatch& micro_batch : list) spans.emplace_back(micro_batch.begin, micro_batch.end);
  }
  std::sort(spans.begin(), spans.end());
  std::int64_t covered = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != covered || end <= begin) {
      throw InvalidArgument(
          fmt::format("step: the script has items [{}, {}) where item {} is the next; each item must be there once.",
                      begin, end, covered));
    }
    covered = end;
  }
  const std::int64_t batch = std::accumulate(options.shares.begin(), options.shares.end(), std::int64_t{0});
  if (covered != batch) {
    throw InvalidArgument(fmt::format("step: the script has {} for a batch of {}.", plural(covered, "item"), batch));
  }
}

void check(const DeviceGroup& group, const StepOptions& options) {
  const std::size_t count = group.size();
  if (options.shares.size() != count) {
    throw InvalidArgument(fmt::format("step: {} for a group of {}; one share per device is needed.",
                                      plural(options.shares.size(), "share"), plural(count, "device")));
  }
  if (std::ranges::any_of(options.shares, [](std::int64_t share) { return share < 0; })) {
    throw InvalidArgument("step: a share is negative. Shares are item counts, zero or more.");
  }
  if (std::ranges::all_of(options.shares, [](std::int64_t share) { return share == 0; })) {
    throw InvalidArgument("step: the batch is empty. Skip the step instead.");
  }
  if ((!options.models.empty() && options.models.size() != count) ||
      (!options.noise.empty() && options.noise.size() != count)) {
    throw InvalidArgument(
        fmt::format("step: models and noise need one entry for each of the {} devices, or none.", count));
  }
  if (!options.run_ahead.empty() && options.run_ahead.size() != count) {
    throw InvalidArgument(fmt::format("step: run_ahead needs one entry for each of the {} devices, or none.", count));
  }
  if (!options.script.empty()) check_script(options);
  if (options.plan != nullptr && options.plan->shares != options.shares) {
    throw InvalidArgument("step: the shares are not those of the plan; pass its own.");
  }
  if (options.micro_batch < 0 || options.granularity < 1 || options.least_items < 1) {
    throw InvalidArgument("step: micro_batch must be 0 (planned) or more, granularity and least_items 1 or more.");
  }
}

}  // namespace

Step::Step(DeviceGroup group, std::shared_ptr<StepProgram> program, StepOptions options) : group_(std::move(group)) {
  check(group_, options);
  plan_ = options.plan;
  if (options.pieces == nullptr) options.pieces = std::make_shared<internal::StepPieces>(group_.ids());
  pieces_ = options.pieces;
  source_ = std::make_shared<internal::StepSource>(group_, std::move(program), std::move(options));
}

Step::~Step() = default;

void Step::start() {
  source_->start_clock();
  group_.submit(source_);
}

std::chrono::steady_clock::time_point Step::started() const noexcept { return source_->started(); }

bool Step::wait(const DeviceGroup::Between& between) { return group_.wait(*source_, between); }

void Step::cancel() {
  source_->cancel(std::make_exception_ptr(Cancelled("step: cancelled before it was done; nothing was committed.")));
}

const StepFailure* Step::failure() const noexcept { return source_->failure(); }
std::vector<bool> Step::takes_part() const { return source_->takes_part(); }
std::vector<std::int64_t> Step::items() const { return source_->items(); }
std::int64_t Step::micro_batches() const { return pieces_->count(); }
bool Step::divided() const { return pieces_->divided(); }
bool Step::settled() const { return source_->program().settled(); }
void Step::settle() const { source_->program().settle(); }
StepRecord Step::record() const { return source_->record(); }

balance::StepTimings StepRecord::timings(std::span<const DeviceId> devices) const {
  PerDevice<std::vector<balance::MicroBatchTiming>> each(devices);
  for (const ClaimRecord& claim : claims) {
    each[claim.micro_batch.device].push_back({claim.micro_batch.size(), claim.seconds(), claim.excluded});
  }
  return {.devices = each.values(),
          .step_seconds = compute_seconds,
          .reduction_seconds = reduce_seconds,
          .startup_seconds = startup_seconds,
          .lent_parts = lent_parts};
}

std::vector<std::int64_t> StepRecord::items(std::span<const DeviceId> devices) const {
  PerDevice<std::int64_t> items(devices);
  for (const ClaimRecord& claim : claims) items[claim.micro_batch.device] += claim.micro_batch.size();
  return items.values();
}

void Step::rethrow_failure() const {
  const StepFailure* failure = source_->failure();
  if (failure == nullptr) return;
  const std::optional<MicroBatch>& at = failure->micro_batch;
  const std::string device = at ? group_.device(at->device).name : "";
  const bool at_items = at && at->size() > 0;
  const auto message = [&](const std::string& what) {
    const std::string where = at_items ? fmt::format("{} failed at items [{}, {})", device, at->begin, at->end)
                                       : fmt::format("{} failed", at ? device : "the reduction");
    return fmt::format("step: {}: {}. Nothing was committed.", where, what);
  };
  internal::rethrow(failure->error, "step", device, at_items, message);
}

StepRecord run_step(const DeviceGroup& group, const std::shared_ptr<StepProgram>& program, StepOptions options,
                    const DeviceGroup::Between& between) {
  Step step(group, program, std::move(options));
  step.start();
  if (!step.wait(between)) {
    step.cancel();
    step.wait();
  }
  step.rethrow_failure();
  step.settle();
  return step.record();
}

}  // namespace paceline
