// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/stage_log.hpp>

#include <algorithm>
#include <limits>
#include <string>

#include <paceline/per_device.hpp>

namespace paceline {
namespace {

std::vector<std::string> names_of(const DeviceGroup& group) {
  std::vector<std::string> names;
  for (const Device& device : group.devices()) names.push_back(device.name);
  return names;
}

}  // namespace

StageLog::StageLog(const DeviceGroup& group)
    : devices_(group.ids()), origin_(std::chrono::steady_clock::now()), metrics_(names_of(group)) {}

void StageLog::add(std::span<const StageRun> stages, std::span<const std::pair<std::int64_t, std::int64_t>> bounds,
                   std::span<const std::vector<ActionRecord>> actions, std::chrono::steady_clock::time_point started,
                   bool moved) {
  observe::StepSample sample;
  PerDevice<std::int64_t> items(devices_);
  PerDevice<std::int64_t> blocks(devices_);
  PerDevice<double> busy_seconds(devices_);
  sample.moved = moved;
  const double origin = std::chrono::duration<double>(started - origin_).count();
  double begin = std::numeric_limits<double>::infinity();
  double end = 0.0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const StageRun& stage = stages[s];
    items[stage.device] = stage.items;
    blocks[stage.device] = stage.blocks;
    for (const ActionRecord& one : actions[s]) {
      const bool forward = one.action.kind == plan::Action::Kind::forward;
      const auto& [first, last] = bounds[static_cast<std::size_t>(one.action.micro_batch)];
      const double seconds = one.finish_seconds - one.start_seconds;
      busy_seconds[stage.device] += seconds;
      begin = std::min(begin, one.start_seconds);
      end = std::max(end, one.finish_seconds);
      events_.push({.kind = forward ? observe::EventKind::forward : observe::EventKind::backward,
                    .device = stage.device,
                    .step = steps_,
                    .begin = first,
                    .end = last,
                    .start_seconds = origin + one.start_seconds,
                    .duration_seconds = seconds});
    }
  }
  begin = std::min(begin, end);  // of a step without actions
  sample.items = items.values();
  sample.blocks = blocks.values();
  sample.busy_seconds = busy_seconds.values();
  sample.compute_seconds = sample.step_seconds = end - begin;
  events_.push({.kind = observe::EventKind::step,
                .step = steps_++,
                .end = bounds.empty() ? 0 : bounds.back().second,
                .start_seconds = origin + begin,
                .duration_seconds = sample.step_seconds});
  metrics_.add(sample);
  history_.add(sample);
}

void StageLog::add(const plan::StagePlan& plan, std::size_t block_count,
                   std::span<const std::vector<ActionRecord>> actions, std::chrono::steady_clock::time_point started,
                   bool moved) {
  std::vector<std::pair<std::int64_t, std::int64_t>> bounds;
  std::int64_t items = 0;
  for (const std::int64_t size : plan.sizes) bounds.emplace_back(items, items + size), items += size;
  std::vector<StageRun> stages;
  for (std::size_t s = 0; s < plan.cuts.size(); ++s) {
    const std::size_t end = s + 1 < plan.cuts.size() ? plan.cuts[s + 1] : block_count;
    stages.push_back({devices_[plan.order[s]], static_cast<std::int64_t>(end - plan.cuts[s]), items});
  }
  add(stages, bounds, actions, started, moved);
}

}  // namespace paceline
