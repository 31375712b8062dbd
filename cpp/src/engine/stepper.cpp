// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/stepper.hpp>

#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

namespace paceline {
namespace {

balance::Balancer make_balancer(const DeviceGroup& group, const StepperOptions& options) {
  balance::BalancerOptions balancer;
  balancer.policy = options.balance;
  balancer.weights = options.weights;
  balancer.granularity = options.granularity;
  for (const Device& device : group.devices()) {
    balance::DeviceProfile profile;
    profile.name = device.name;
    profile.device_class = device.device_class;
    balancer.devices.push_back(std::move(profile));
  }
  return balance::Balancer(std::move(balancer));
}

std::vector<std::string> names_of(const DeviceGroup& group) {
  std::vector<std::string> names;
  for (const Device& device : group.devices()) names.push_back(device.name);
  return names;
}

}  // namespace

struct Stepper::State {
  State(DeviceGroup the_group, StepperOptions the_options)
      : group(std::move(the_group)),
        options(std::move(the_options)),
        balancer(make_balancer(group, options)),
        metrics(names_of(group)),
        origin(std::chrono::steady_clock::now()) {
    for (const Device& device : group.devices()) asynchronous = asynchronous || backend_of(device).asynchronous();
  }

  void note_events(const StepRecord& done) {
    const double end = std::chrono::duration<double>(std::chrono::steady_clock::now() - origin).count();
    const double start = end - done.step_seconds;
    if (plan.moved) events.push({.kind = observe::EventKind::move, .step = plan.step, .start_seconds = start});
    events.push({.kind = observe::EventKind::step,
                 .step = plan.step,
                 .end = plan.batch_size,
                 .start_seconds = start,
                 .duration_seconds = done.step_seconds});
    for (const ClaimRecord& claim : done.claims) {
      events.push({.kind = observe::EventKind::micro_batch,
                   .device_index = static_cast<std::int32_t>(claim.micro_batch.device_index),
                   .step = plan.step,
                   .begin = claim.micro_batch.begin,
                   .end = claim.micro_batch.end,
                   .start_seconds = start + claim.start_seconds,
                   .duration_seconds = claim.finish_seconds - claim.start_seconds});
    }
    events.push({.kind = observe::EventKind::reduction,
                 .step = plan.step,
                 .start_seconds = end - done.reduce_seconds,
                 .duration_seconds = done.reduce_seconds});
  }

  DeviceGroup group;
  StepperOptions options;
  bool asynchronous = false;  // any of the devices
  balance::Balancer balancer;
  observe::MetricsRecorder metrics;
  observe::EventRing events;
  balance::StepPlan plan;
  StepRecord record;
  std::chrono::steady_clock::time_point origin;
  std::mutex cancel_mutex;
  std::function<void()> cancel_running;
};

Stepper::Stepper(DeviceGroup group, StepperOptions options) {
  if (options.micro_batch < 0) {
    throw InvalidArgument(
        fmt::format("micro_batch is {}; give a size of at least 1, or 0 to have it planned.", options.micro_batch));
  }
  state_ = std::make_unique<State>(std::move(group), std::move(options));
}

Stepper::~Stepper() = default;

std::unique_ptr<Step> Stepper::begin(std::int64_t batch_size, std::shared_ptr<StepProgram> program) {
  if (batch_size < 1) {
    throw InvalidArgument(fmt::format("step: a batch of {} items; at least one is needed.", batch_size));
  }
  State& state = *state_;
  require_idle();
  state.plan = state.balancer.next_plan(batch_size);
  StepOptions options;
  options.shares = state.plan.shares;
  options.models = state.plan.models;
  options.noise = state.plan.noise;
  options.micro_batch = state.options.micro_batch;
  options.granularity = state.options.granularity;
  // Corrections of any size would be new shapes: asynchronous devices keep to sizes that the user chose.
  options.stealing = state.options.balance == "auto" && !(state.asynchronous && options.micro_batch == 0);
  options.announce_last = state.asynchronous;
  auto step = std::make_unique<Step>(state.group, std::move(program), std::move(options));
  {
    const std::lock_guard lock(state.cancel_mutex);
    state.cancel_running = step->canceller();
  }
  step->start();
  return step;
}

void Stepper::cancel() {
  const std::lock_guard lock(state_->cancel_mutex);
  if (state_->cancel_running) state_->cancel_running();
}

void Stepper::require_idle() const {
  if (!state_->group.busy()) return;
  throw InvalidArgument(
      "step: an earlier step of this group has not ended: its workers are still inside user code. Wait for it, or "
      "close "
      "the trainer.");
}

void Stepper::commit(const Step& step) {
  State& state = *state_;
  state.record = step.record();
  const std::size_t count = state.group.size();
  const balance::StepTimings timings = state.record.timings(count);
  state.balancer.record(timings);
  observe::StepSample sample;
  sample.items = state.record.items(count);
  sample.compute_seconds = state.record.compute_seconds;
  sample.step_seconds = state.record.step_seconds;
  sample.moved = state.plan.moved;
  for (const auto& runs : timings.devices) {
    double busy = 0.0;
    for (const balance::MicroBatchTiming& run : runs) busy += run.seconds;
    sample.busy_seconds.push_back(busy);
  }
  state.metrics.add(sample);
  state.note_events(state.record);
}

const balance::StepPlan& Stepper::plan() const noexcept { return state_->plan; }
const StepRecord& Stepper::last_step() const noexcept { return state_->record; }
observe::Metrics Stepper::metrics() const { return state_->metrics.snapshot(); }
const observe::EventRing& Stepper::events() const noexcept { return state_->events; }
balance::Balancer& Stepper::balancer() noexcept { return state_->balancer; }
const balance::Balancer& Stepper::balancer() const noexcept { return state_->balancer; }
const DeviceGroup& Stepper::group() const noexcept { return state_->group; }

}  // namespace paceline
