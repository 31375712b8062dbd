// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/pipeline_core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include <paceline/error.hpp>

#include "engine/objective_state.hpp"
#include "engine/rethrow.hpp"
#include "plural.hpp"

namespace paceline::internal {
namespace {

using Kind = plan::Action::Kind;

constexpr std::size_t kStepsAhead = 2;  // of the GPUs

const PipelineOptions& checked(const DeviceGroup& group, const PipelineOptions& options) {
  const auto fits = [&](std::size_t size, std::size_t wanted, const char* what, const char* of) {
    if (size == 0 || size == wanted) return;
    throw InvalidArgument(fmt::format("Pipeline: {} has {} for {}; give one each, or none.", what,
                                      plural(size, "entry", "entries"), plural(wanted, of)));
  };
  if (options.blocks.empty())
    throw InvalidArgument("Pipeline: there are no blocks. Give the sizes of the model's blocks.");
  if (options.blocks.back().output_count != 0) {
    throw InvalidArgument(
        "Pipeline: the last block has an output, which no block would read. It computes the loss: set its output_count "
        "to 0.");
  }
  if (options.batch_size < 1) {
    throw InvalidArgument(
        fmt::format("Pipeline: batch_size is {}; give the items of a usual step.", options.batch_size));
  }
  fits(options.costs.size(), options.blocks.size(), "costs", "block");
  fits(options.speeds.size(), group.size(), "speeds", "device");
  fits(options.memory_limits.size(), group.size(), "memory_limits", "device");
  return options;
}

plan::StageProblem problem_of(const DeviceGroup& group, const PipelineOptions& options, std::size_t element) {
  plan::StageProblem problem{
      .blocks = checked(group, options).costs, .devices = {}, .batch_size = options.batch_size, .link = options.link};
  // Without costs: any times that are equal. They are replaced as soon as the blocks are measured.
  if (problem.blocks.empty()) {
    problem.blocks.resize(options.blocks.size(), {.forward_per_item = 1e-3, .backward_per_item = 2e-3});
  }
  const auto bytes = [&](std::size_t count) { return static_cast<std::int64_t>(count * element); };
  for (std::size_t b = 0; b < options.blocks.size(); ++b) {
    const PipelineBlock& sizes = options.blocks[b];
    plan::BlockCost& cost = problem.blocks[b];
    cost.parameter_bytes = bytes(3 * sizes.parameter_count + sizes.state_count);  // gradients and their sums
    const std::size_t input = b == 0 ? 0 : options.blocks[b - 1].output_count;
    cost.saved_bytes_per_item = bytes(sizes.saved_count + sizes.output_count);
    cost.boundary_bytes_per_item = bytes(input);
    // Gradients between blocks, by turns, and one place more for those at the boundary than the stage has in flight.
    cost.workspace_bytes_per_item += bytes(2 * std::max(input, sizes.output_count) + input);
  }
  for (std::size_t d = 0; d < group.size(); ++d) {
    const Device& device = group.devices()[d];
    plan::StageDevice one{.name = device.name};
    if (!options.speeds.empty()) one.speed = options.speeds[d];
    if (!options.memory_limits.empty() && options.memory_limits[d] > 0) one.memory_bytes = options.memory_limits[d];
    for (one.memory_space = 0; group.devices()[one.memory_space].memory_space != device.memory_space;) {
      ++one.memory_space;  // the number of the first device there
    }
    problem.devices.push_back(std::move(one));
  }
  return problem;
}

std::vector<BlockBytes> bytes_of(const PipelineOptions& options, std::size_t element) {
  std::vector<BlockBytes> all;
  for (const PipelineBlock& one : options.blocks) {
    all.push_back({one.parameter_count * element, one.state_count * element, one.output_count * element,
                   one.saved_count * element});
  }
  return all;
}

/// Calls a function on the worker of each stage's device. It is opened on these.
class StageTask final : public GroupTask {
 public:
  StageTask(std::vector<DeviceId> devices, std::function<void(std::size_t)> body)
      : devices_(std::move(devices)), body_(std::move(body)) {}
  void run(DeviceId device) noexcept override {
    const auto stage = static_cast<std::size_t>(std::ranges::find(devices_, device) - devices_.begin());
    try {
      body_(stage);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (error_ == nullptr) {
        error_ = std::current_exception();
        stage_ = stage;
      }
    }
  }
  [[nodiscard]] const std::vector<DeviceId>& devices() const noexcept { return devices_; }
  // When it is complete: the first error, and where it was.
  [[nodiscard]] const std::exception_ptr& error() const noexcept { return error_; }
  [[nodiscard]] std::size_t stage() const noexcept { return stage_; }

 private:
  std::vector<DeviceId> devices_;
  std::function<void(std::size_t)> body_;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::size_t stage_ = 0;
};

}  // namespace

PipelineCore::PipelineCore(DeviceGroup group, const PipelineOptions& options, DType dtype)
    : group_(std::move(group)),
      blocks_(options.blocks),
      dtype_(dtype),
      devices_(group_, options.timeout),
      planner_(problem_of(group_, options, size_of(dtype)), options.stages, options.moves, options.costs.empty()),
      log_(group_),
      plan_(planner_.plan(options.batch_size)),
      memory_(devices_, bytes_of(options, size_of(dtype)), options.memory_limits, *plan_) {}

std::vector<DeviceId> PipelineCore::devices_of(const plan::StagePlan& plan) const {
  std::vector<DeviceId> devices;
  for (const std::size_t place : plan.order) devices.push_back(devices_.at(place));
  return devices;
}

std::shared_ptr<StepMarks> PipelineCore::take_marks(const plan::StagePlan& plan) {
  const auto count = static_cast<std::size_t>(plan.schedule.micro_batches);
  for (const auto& one : marks_) {
    if (one.use_count() == 1 && one->actions.front()[0].size() == count) return one;
  }
  std::erase_if(marks_, [](const auto& one) { return one.use_count() == 1; });
  auto marks = std::make_shared<StepMarks>(plan.order.size(), plan.schedule.micro_batches);
  for (std::size_t s = 0; s < plan.order.size(); ++s) {
    if (AsyncDevice* const device = devices_.opened(devices_.at(plan.order[s])))
      marks->over[s] = device->make_event(false);
  }
  if (marks->over.back() != nullptr) marks->loss = devices_.allocate_pinned(sizeof(double));
  return marks_.emplace_back(std::move(marks));
}

Objective PipelineCore::step(std::int64_t batch_size, const BlockCalls& calls, double weight) {
  if (batch_size < 1) throw InvalidArgument(fmt::format("step: batch_size is {}; it must be 1 or more.", batch_size));
  check_weight(weight);
  devices_.check();
  collect(planner_.awaits_samples() ? 0 : kStepsAhead - 1);
  const std::int64_t moves = planner_.move_count();
  for (;;) {
    const std::shared_ptr<const plan::StagePlan> plan = planner_.plan(batch_size);
    bool first = false;
    try {
      first = memory_.arrange(*plan);
    } catch (const OutOfMemory& error) {
      const auto is_there = [&](std::size_t place) { return group_.devices()[place].name == error.device(); };
      const auto at = std::ranges::find_if(plan->order, is_there);
      if (at == plan->order.end()) throw;
      if (!planner_.out_of_memory(static_cast<std::size_t>(at - plan->order.begin()))) throw;
      continue;
    }
    if (first) marks_.clear();  // their events belong to the devices of the stages
    std::shared_ptr<StepMarks> marks = take_marks(*plan);
    const bool measures = planner_.measures();
    const auto run = std::make_shared<PipelineRun>(memory_, plan, calls, marks, measures);
    PipelineStep step(group_, run, plan->schedule, devices_of(*plan));
    const auto started = std::chrono::steady_clock::now();
    step.start();
    step.wait();
    if (const PipelineFailure* const failure = step.failure()) {
      devices_.drain();
      try {
        rethrow(*run, *failure);
      } catch (const OutOfMemory&) {
        if (!planner_.out_of_memory(failure->action.stage)) throw;
      }
      continue;
    }
    try {
      run->prepare_commit(1.0 / weight, dtype_);
      on_stages(
          "step", [&](std::size_t stage) { run->commit(stage); },
          [](std::size_t stage) { return fmt::format("the sum of the gradients of stage {}", stage); });
    } catch (...) {  // a stage has failed, or the group is closed: the caller may free what the step used
      devices_.drain();
      throw;
    }
    planner_.ran();
    plan_ = plan;
    pending_.add(std::make_shared<Pending>(
        Pending{plan, marks, step.record(), started, first, measures, planner_.move_count() != moves, &devices_}));
    if (!devices_.asynchronous()) {
      collect(0);
      return Objective(run->loss() / weight);
    }
    return Objective::State::objective(std::make_shared<Objective::State>(
        [marks = std::move(marks), known = run->loss(), weight, timeout = devices_.timeout(), hung = devices_.hung()] {
          marks->wait(timeout, hung);
          const double there = marks->loss == nullptr ? 0.0 : *static_cast<const double*>(marks->loss->data());
          return (there + known) / weight;
        }));
  }
}

void PipelineCore::update(const std::function<void(std::size_t, BlockMemory&, NativeStream)>& body) {
  devices_.check();
  if (memory_.stages().empty()) memory_.arrange(*plan_);
  std::vector<std::size_t> at(memory_.stages().size());
  on_stages(
      "update",
      [&](std::size_t s) {
        const Stage& stage = memory_.stages()[s];
        for (std::size_t b = at[s] = stage.begin; b < stage.end; at[s] = ++b) {
          body(b, memory_.block(b), stream(stage.device));
        }
      },
      [&](std::size_t s) { return fmt::format("block {}", at[s]); });
}

void PipelineCore::on_stages(const char* call, const std::function<void(std::size_t)>& body,
                             const std::function<std::string(std::size_t)>& what) {
  std::vector<DeviceId> devices;
  for (const Stage& stage : memory_.stages()) devices.push_back(stage.device);
  const auto task = std::make_shared<StageTask>(std::move(devices), body);
  group_.open(task, {.gang = true}, task->devices());
  group_.wait(*task);
  if (task->error() == nullptr) return;
  const std::string& device = devices_.name(memory_.stages()[task->stage()].device);
  internal::rethrow(task->error(), call, device, true, [&](const std::string& why) {
    return fmt::format("{}: {} failed on {}: {}", call, what(task->stage()), device, why);
  });
}

void PipelineCore::Pending::settle() const {
  // Any of the devices may be the last.
  marks->wait(devices->timeout(), devices->hung());
}

void PipelineCore::collect(std::size_t most) {
  try {
    pending_.settle(most, [this](Pending& step) { note(step); });
  } catch (const Error&) {
    planner_.forget_unrecorded();
    throw;
  }
}

void PipelineCore::note(Pending& step) {
  if (step.measures) {
    planner_.record(samples(step));
  } else {
    std::vector<balance::MeasuredStage> timings(step.plan->order.size());
    for (std::size_t s = 0; s < timings.size(); ++s) {
      timings[s].excluded = step.first;
      for (std::int64_t m = 0; m < step.plan->schedule.micro_batches; ++m) {
        timings[s].forwards.push_back(step.marks->at(s, Kind::forward, m).seconds());
        timings[s].backwards.push_back(step.marks->at(s, Kind::backward, m).seconds());
      }
    }
    planner_.record(*step.plan, timings);
  }
  stamp(step);
  log_.add(*step.plan, blocks_.size(), step.record, step.started, step.moved);
  last_step_ = {.plan = *step.plan, .actions = std::move(step.record), .step_seconds = 0.0};
  for (const auto& actions : last_step_.actions) {
    last_step_.step_seconds = std::max(last_step_.step_seconds, actions.back().finish_seconds);
  }
}

std::vector<BlockSample> PipelineCore::samples(const Pending& step) const {
  const plan::StagePlan& plan = *step.plan;
  std::vector<BlockSample> samples;
  for (std::size_t s = 0; s < plan.order.size(); ++s) {
    const std::size_t begin = plan.cuts[s];
    const std::size_t end = s + 1 < plan.cuts.size() ? plan.cuts[s + 1] : blocks_.size();
    for (std::size_t b = begin; b < end; ++b) {
      for (const Kind kind : {Kind::forward, Kind::backward}) {
        const std::size_t k = kind == Kind::forward ? b - begin : end - 1 - b;
        for (std::size_t m = 0; m < plan.sizes.size(); ++m) {
          const double seconds = step.marks->at(s, kind, static_cast<std::int64_t>(m)).seconds(k, k + 1);
          samples.push_back({b, plan.order[s], kind == Kind::backward, plan.sizes[m], seconds});
        }
      }
    }
  }
  return samples;
}

/// Puts the times of the devices in the place of those of the host, which only enqueued the work.
void PipelineCore::stamp(Pending& step) const {
  for (std::size_t s = 0; s < step.record.size(); ++s) {
    std::vector<ActionRecord>& actions = step.record[s];
    const auto marks = [&](const ActionRecord& one) -> const ActionMarks& {
      return step.marks->at(s, one.action.kind, one.action.micro_batch);
    };
    const Event* const origin = marks(actions.front()).begin();
    if (origin == nullptr) continue;
    const double zero = actions.front().start_seconds;
    for (ActionRecord& one : actions) {
      const ActionMarks& mine = marks(one);
      one.start_seconds = zero + (mine.begin() == origin ? 0.0 : mine.begin()->seconds_since(*origin));
      one.finish_seconds = one.start_seconds + mine.seconds();
    }
  }
}

void PipelineCore::rethrow(const PipelineRun& run, const PipelineFailure& failure) const {
  const StageAction& at = failure.action;
  const Stage& stage = memory_.stages()[at.stage];
  const std::string& device = devices_.name(at.device);
  internal::rethrow(failure.error, "step", device, true, [&](const std::string& what) {
    return fmt::format(
        "step: block {} of stage {} (blocks {} to {}) failed on {} in the {} of micro-batch {}, items [{}, {}): {}. "
        "Nothing was committed.",
        run.block(at.stage), at.stage, stage.begin, stage.end - 1, device,
        at.kind == Kind::forward ? "forward" : "backward", at.micro_batch, run.begin(at.micro_batch),
        run.end(at.micro_batch), what);
  });
}

BlockMemory& PipelineCore::block(std::size_t index) {
  if (index < blocks_.size()) return memory_.block(index);
  throw InvalidArgument(fmt::format("Pipeline: there is no block {} among {}.", index, blocks_.size()));
}

NativeStream PipelineCore::stream(DeviceId device) const {
  const Stream* const work = devices_.work(device);
  return work == nullptr ? nullptr : work->native();
}

}  // namespace paceline::internal
