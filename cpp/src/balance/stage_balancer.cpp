// SPDX-License-Identifier: Apache-2.0
#include <paceline/balance/stage_balancer.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <paceline/balance/report.hpp>
#include <paceline/error.hpp>

#include "balance/bounded.hpp"
#include "balance/stage_balancer_state.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::balance {
namespace {

constexpr double kLeastStageGain = 0.01;  // of a step; less is no reason to move
constexpr double kMarginErrors = 2.0;     // standard errors
constexpr std::size_t kPlansKept = 16;    // batch sizes
constexpr std::size_t kRecentMoves = 16;
constexpr std::int64_t kLookEvery = 16;  // steps; estimates become surer although they stay the same
constexpr double kNewSpeed = 0.005;      // a change of a speed that is worth another look
constexpr double kNewNoise = 0.02;

plan::StageProblem checked(plan::StageProblem problem) {
  require(!problem.blocks.empty(), "a pipeline needs at least one block: give the costs of the model's blocks");
  require(!problem.devices.empty(), "a pipeline needs at least one device");
  for (const plan::StageDevice& device : problem.devices) {
    require(std::isfinite(device.speed) && device.speed > 0.0, "the speed of {} is {}: it must be above zero",
            device.name, device.speed);
  }
  return problem;
}

}  // namespace

std::size_t ActiveProblem::local(std::size_t device) const {
  return static_cast<std::size_t>(std::ranges::find(devices, device) - devices.begin());
}

std::vector<std::size_t> ActiveProblem::local(std::span<const std::size_t> order) const {
  std::vector<std::size_t> out;
  for (const std::size_t device : order) out.push_back(local(device));
  return out;
}

StageBalancer::State::State(plan::StageProblem problem, plan::StageOptions with, MoveCost price)
    : given(checked(std::move(problem))),
      options(std::move(with)),
      cost(price),
      knowledge(given),
      retired(given.devices.size(), false) {
  const auto sane = [](double value) { return std::isfinite(value) && value >= 0.0; };
  require(sane(cost.bytes_per_second) && sane(cost.first_run_seconds),
          "a move costs {} s and goes at {} bytes/s: neither may be negative", cost.first_run_seconds,
          cost.bytes_per_second);
  if (cost.bytes_per_second <= 0.0) cost.bytes_per_second = given.link.bytes_per_second;
  for (const plan::StageDevice& device : given.devices) caps.push_back(device.memory_bytes);
  most_in_flight = options.most_in_flight;
}

ActiveProblem StageBalancer::State::active(std::int64_t items) const {
  ActiveProblem out{.problem = knowledge.problem(step), .devices = {}};
  out.problem.batch_size = items;
  std::vector<plan::StageDevice> devices;
  for (std::size_t id = 0; id < caps.size(); ++id) {
    if (retired[id]) continue;
    devices.push_back(out.problem.devices[id]);
    devices.back().memory_bytes = caps[id];
    out.devices.push_back(id);
  }
  out.problem.devices = std::move(devices);
  return out;
}

plan::StageOptions StageBalancer::State::wanted(const ActiveProblem& problem) const {
  plan::StageOptions out = options;
  out.order.clear();
  for (const std::size_t device : options.order) {
    if (device >= retired.size() || !retired[device]) out.order.push_back(problem.local(device));
  }
  if (out.order.size() != options.order.size() || problem.devices.size() < options.cuts.size()) out.cuts.clear();
  out.indifference = kLeastStageGain;
  out.previous_cuts = cuts;
  out.previous_order = problem.local(order);
  return out;
}

plan::StageOptions StageBalancer::State::fixed(const ActiveProblem& problem) const {
  plan::StageOptions out = wanted(problem);
  out.cuts = cuts;
  out.order = problem.local(order);
  return out;
}

plan::StagePlan StageBalancer::State::search(const ActiveProblem& problem, plan::StageOptions with) const {
  const std::int64_t most = std::max<std::int64_t>(1, problem.problem.batch_size / least_items);
  if (with.micro_batches) with.micro_batches = std::min(*with.micro_batches, most);
  plan::StagePlan out = plan::plan_stages(problem.problem, with);
  if (out.schedule.micro_batches > most) {  // as many as there may be are then the nearest to the best
    with.micro_batches = most;
    out = plan::plan_stages(problem.problem, with);
  }
  for (std::size_t& device : out.order) device = problem.devices[device];
  return out;
}

/// What a plan takes by present knowledge.
plan::StagePlan StageBalancer::State::evaluate(const ActiveProblem& problem, const plan::StagePlan& plan) const {
  plan::StagePlan out = plan::evaluate_stages(problem.problem, plan.cuts, problem.local(plan.order),
                                              plan.schedule.micro_batches, plan.schedule);
  out.order = plan.order;
  return out;
}

StageBalancer::State::Promise StageBalancer::State::promise(const ActiveProblem& problem, const plan::StagePlan& now,
                                                            plan::StagePlan other) const {
  Promise out{.plan = std::move(other)};
  out.gain = now.seconds - out.plan.seconds;
  double variance = 0.0;
  for (std::size_t i = 0; i < problem.devices.size(); ++i) {
    ActiveProblem shifted = problem;
    shifted.problem.devices[i].speed /= 1.0 + knowledge.error(problem.devices[i]);
    const double gain = evaluate(shifted, now).seconds - evaluate(shifted, out.plan).seconds;
    variance += (gain - out.gain) * (gain - out.gain);
  }
  out.errors = kMarginErrors * std::sqrt(variance);
  out.required = std::max(kLeastStageGain * now.seconds, out.errors);
  return out;
}

double StageBalancer::State::price(std::int64_t bytes) const {
  if (bytes == 0) return 0.0;
  const double copies = cost.bytes_per_second > 0.0 ? static_cast<double>(bytes) / cost.bytes_per_second : 0.0;
  return copies + cost.first_run_seconds;
}

void StageBalancer::State::adopt(const plan::StagePlan& next, StageMove::Kind kind, double before, std::int64_t bytes) {
  const bool moves_stages = next.cuts != cuts || next.order != order;
  if (!cuts.empty()) {
    keep_last(recent,
              {kind, changes++, step, cuts, next.cuts, order, next.order, before, next.seconds, bytes, price(bytes),
               reason(kind)},
              kRecentMoves);
    if (moves_stages) ++moves;
  }
  if (moves_stages) {
    plans.clear();
    regret = 0.0;
  }
  cuts = next.cuts;
  order = next.order;
  plans.insert_or_assign(batch_size, Planned{next, step});
  better.reset();
  next_look = step;
  if (kind != StageMove::Kind::depth || reasons.devices.empty()) reasons = knowledge.problem(step);
}

/// What has changed since the last change of plans.
std::string StageBalancer::State::reason(StageMove::Kind kind) const {
  if (kind == StageMove::Kind::memory) return "a stage ran out of memory";
  if (kind == StageMove::Kind::devices) return "a device left";
  const plan::StageProblem now = knowledge.problem(step);
  std::size_t most = 0;
  const auto change = [&](std::size_t i) { return std::log(reasons.devices[i].speed / now.devices[i].speed); };
  for (std::size_t i = 1; i < retired.size(); ++i) {
    if (std::abs(change(i)) > std::abs(change(most))) most = i;
  }
  const double factor = std::exp(change(most));
  const std::string& name = given.devices[most].name;
  if (factor > 1.0 + kLeastStageGain) return fmt::format("{} takes {:.2f} times as long as before", name, factor);
  if (factor < 1.0 - kLeastStageGain) return fmt::format("{} is {:.2f} times as fast as before", name, 1.0 / factor);
  return "the times that were measured since";
}

void StageBalancer::State::plan_anew(const ActiveProblem& problem) {
  const auto before = plans.find(batch_size);
  const double seconds = before == plans.end() ? 0.0 : before->second.plan.seconds;
  const plan::StagePlan next = search(problem, wanted(problem));
  plans.clear();
  adopt(next, why_invalid, seconds, next.moved_bytes);
  stages_invalid = false;
}

bool StageBalancer::State::is_news(const plan::StageProblem& problem) const {
  if (seen.size() != problem.devices.size()) return true;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const plan::StageDevice& now = problem.devices[i];
    if (std::abs(now.speed / seen[i].speed - 1.0) > kNewSpeed) return true;
    if (std::abs(now.noise - seen[i].noise) > kNewNoise) return true;
  }
  return false;
}

/// Compares the plan in force with others: first those of the same stages, then all.
void StageBalancer::State::look(const ActiveProblem& problem) {
  if (is_news(problem.problem)) {
    last_news = step;
    seen = problem.problem.devices;
  }
  next_look = step + std::clamp<std::int64_t>(step - last_news, 1, kLookEvery);
  plan::StagePlan& now = plans.at(batch_size).plan;
  now = evaluate(problem, now);
  const Promise depth = promise(problem, now, search(problem, fixed(problem)));
  if (depth.gain > depth.required) {
    const std::int64_t again = next_look;
    const double owed = regret;
    adopt(depth.plan, StageMove::Kind::depth, now.seconds, 0);
    next_look = again;
    regret = owed;
  }
  better = promise(problem, plans.at(batch_size).plan, search(problem, wanted(problem)));
  if (better->plan.cuts == cuts && better->plan.order == order) better.reset();
}

/// One step of ski rental.
void StageBalancer::State::reconsider(const ActiveProblem& problem) {
  if (knowledge.unsettled()) return;
  if (step >= next_look || is_news(problem.problem)) look(problem);
  if (!better) {
    regret = 0.0;
    return;
  }
  const bool pays = better->gain > better->required;
  regret = std::max(0.0, regret + better->gain - (pays ? better->errors : better->required));
  if (!pays || regret < price(better->plan.moved_bytes)) return;
  const Promise next = *better;
  adopt(next.plan, StageMove::Kind::cuts, next.plan.seconds + next.gain, next.plan.moved_bytes);
}

StageBalancer::StageBalancer(plan::StageProblem problem, plan::StageOptions options, MoveCost cost)
    : state_(std::make_unique<State>(std::move(problem), std::move(options), cost)) {}
StageBalancer::~StageBalancer() = default;
StageBalancer::StageBalancer(StageBalancer&&) noexcept = default;
StageBalancer& StageBalancer::operator=(StageBalancer&&) noexcept = default;

const plan::StagePlan& StageBalancer::plan(std::int64_t batch_size) {
  State& state = *state_;
  require(batch_size >= 1, "the batch has {} items: it must have at least one", batch_size);
  if (state.awaiting_record && state.batch_size == batch_size && !state.stages_invalid) return state.current();
  const ActiveProblem problem = state.active(batch_size);
  const std::int64_t before = std::exchange(state.batch_size, batch_size);
  try {
    if (!state.stages_invalid && !state.plans.contains(batch_size)) {
      try {
        make_room(state.plans, batch_size, kPlansKept, [](const State::Planned& one) { return one.last_used; });
        state.plans[batch_size] = {state.search(problem, state.fixed(problem)), state.step};
      } catch (const OutOfMemory&) {  // the present stages cannot run a batch of this size
        state.plans.erase(batch_size);
        state.stages_invalid = true;
        state.why_invalid = StageMove::Kind::memory;
      }
      state.better.reset();
      state.next_look = state.step;
    }
    if (state.stages_invalid) {
      state.plan_anew(problem);
    } else if (!state.awaiting_record) {
      if (before != batch_size) state.next_look = state.step;
      state.try_memory_again();
      state.reconsider(problem);
    }
  } catch (...) {
    state.batch_size = before;
    throw;
  }
  if (!std::exchange(state.awaiting_record, true)) keep_last(state.batch_sizes, batch_size, kRecentPlans);
  state.plans.at(batch_size).last_used = state.step;
  return state.current();
}

void StageBalancer::set_least_items(std::int64_t items) {
  State& state = *state_;
  require(items >= 1, "a micro-batch has at least {} items: it must be at least one", items);
  if (std::exchange(state.least_items, items) == items) return;
  state.plans.clear();
  state.better.reset();
  state.batch_size = 0;
  state.awaiting_record = false;
}

void StageBalancer::record(std::span<const MeasuredStage> stages) {
  State& state = *state_;
  require(state.awaiting_record, "record without a plan: call plan before each step");
  const plan::StagePlan& plan = state.current();
  require(stages.size() == plan.cuts.size(), "times of {} for a plan of {}", plural(stages.size(), "stage"),
          plural(plan.cuts.size(), "stage"));
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const std::string& name = state.given.devices[plan.order[i]].name;
    for (const std::vector<double>* times : {&stages[i].forwards, &stages[i].backwards}) {
      if (times->size() != plan.sizes.size()) {
        throw InvalidArgument(fmt::format("stage {} on {} reports times of {} for a plan of {}: give one per forward "
                                          "and one per backward",
                                          i, name, plural(times->size(), "micro-batch", "micro-batches"),
                                          plural(plan.sizes.size(), "micro-batch", "micro-batches")),
                              name);
      }
      for (const double seconds : *times) {
        if (std::isfinite(seconds) && seconds >= 0.0) continue;
        throw InvalidArgument(fmt::format("stage {} on {} reports {} s for one action", i, name, seconds), name);
      }
    }
  }
  state.knowledge.record(state.step, plan, stages);
  state.awaiting_record = false;
  ++state.step;
}

bool StageBalancer::retired(std::size_t device) const {
  require(device < state_->retired.size(), "there is no device {}: there are {}", device, state_->retired.size());
  return state_->retired[device];
}

void StageBalancer::retire(std::size_t device) {
  State& state = *state_;
  if (retired(device)) return;
  if (std::ranges::count(state.retired, false) == 1) {
    const std::string& name = state.given.devices[device].name;
    throw InvalidArgument(fmt::format("{} is the last device: it cannot be retired", name), name);
  }
  state.retired[device] = true;
  state.better.reset();
  // Stages that an earlier call made invalid stay so: before the first plan, or with another device that was retired.
  if (std::ranges::find(state.order, device) != state.order.end()) state.stages_invalid = true;
  state.why_invalid = StageMove::Kind::devices;
  state.next_look = state.step;
}

void StageBalancer::restore(std::size_t device) {
  State& state = *state_;
  if (!retired(device)) return;
  state.retired[device] = false;
  state.better.reset();
  state.caps[device] = state.given.devices[device].memory_bytes;
  if (state.proven) state.proven->caps[device] = state.caps[device];
  state.next_look = state.step;
}

plan::StageProblem StageBalancer::problem() const {
  plan::StageProblem out = state_->knowledge.problem(state_->step);
  if (state_->batch_size > 0) out.batch_size = state_->batch_size;
  for (std::size_t id = 0; id < state_->caps.size(); ++id) out.devices[id].memory_bytes = state_->caps[id];
  return out;
}

std::int64_t StageBalancer::steps() const noexcept { return state_->step; }
std::int64_t StageBalancer::move_count() const noexcept { return state_->moves; }
const std::vector<StageMove>& StageBalancer::recent_moves() const noexcept { return state_->recent; }

}  // namespace paceline::balance
