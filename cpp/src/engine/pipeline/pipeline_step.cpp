// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pipeline_step.hpp>

#include <fmt/format.h>

#include <utility>

#include <paceline/error.hpp>
#include <paceline/per_device.hpp>

#include "engine/pipeline/pipeline_source.hpp"
#include "engine/rethrow.hpp"
#include "plural.hpp"

namespace paceline {

PipelineProgram::~PipelineProgram() = default;

namespace {

void check(const DeviceGroup& group, const plan::Schedule& schedule, const std::vector<DeviceId>& devices) {
  plan::check(schedule);
  if (devices.size() != schedule.stages.size()) {
    throw InvalidArgument(fmt::format("pipeline: {} for {}; one device per stage is needed.",
                                      plural(devices.size(), "device"), plural(schedule.stages.size(), "stage")));
  }
  PerDevice<bool> taken(group.ids());
  for (const DeviceId device : devices) {
    if (taken.find(device) == nullptr) {
      throw InvalidArgument(
          fmt::format("pipeline: a stage is on device {} of a group of {}.", device.number(), group.size()));
    }
    if (std::exchange(taken[device], true)) {
      throw InvalidArgument(
          fmt::format("pipeline: {} has two stages. Merge them into one.", group.device(device).name));
    }
  }
}

}  // namespace

PipelineStep::PipelineStep(DeviceGroup group, std::shared_ptr<PipelineProgram> program, plan::Schedule schedule,
                           std::vector<DeviceId> devices)
    : group_(std::move(group)) {
  check(group_, schedule, devices);
  source_ = std::make_shared<internal::PipelineSource>(std::move(program), std::move(schedule), std::move(devices));
}

PipelineStep::~PipelineStep() = default;

void PipelineStep::start() {
  source_->start_clock();
  group_.open(source_, {.gang = true}, source_->devices());
}

bool PipelineStep::wait(const DeviceGroup::Between& between) { return group_.wait(*source_, between); }

void PipelineStep::cancel() {
  source_->cancel(std::make_exception_ptr(Cancelled("pipeline: cancelled before it was done; nothing was committed.")));
}

const plan::Schedule& PipelineStep::schedule() const noexcept { return source_->schedule(); }
const std::vector<DeviceId>& PipelineStep::devices() const noexcept { return source_->devices(); }
const PipelineFailure* PipelineStep::failure() const noexcept { return source_->failure(); }
std::vector<std::vector<ActionRecord>> PipelineStep::record() const { return source_->record(); }

void PipelineStep::rethrow_failure() const {
  const PipelineFailure* failure = source_->failure();
  if (failure == nullptr) return;
  const StageAction& at = failure->action;
  const std::string device = group_.device(at.device).name;
  const char* kind = at.kind == plan::Action::Kind::forward ? "forward" : "backward";
  internal::rethrow(failure->error, "pipeline", device, true, [&](const std::string& what) {
    return fmt::format("pipeline: stage {} on {} failed in the {} of micro-batch {}: {}. Nothing was committed.",
                       at.stage, device, kind, at.micro_batch, what);
  });
}

}  // namespace paceline
