// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <paceline/balance/report.hpp>
#include <paceline/balance/stage_balancer.hpp>
#include <paceline/error.hpp>

#include "balance/stage_balancer_state.hpp"
#include "bytes_text.hpp"
#include "plural.hpp"

namespace paceline::balance {
namespace {

/// "would make steps 3.1 % shorter"
std::string gain_text(double now, double then) {
  const double percent = 100.0 * (1.0 - then / now);
  if (std::abs(percent) < 0.05) return "would make no difference";
  return fmt::format("would make steps {:.1f} % {}", std::abs(percent), percent > 0.0 ? "shorter" : "longer");
}

const char* name_of(StageMove::Kind kind) {
  switch (kind) {
    case StageMove::Kind::depth:
      return "other micro-batches or depth";
    case StageMove::Kind::memory:
      return "less memory";
    case StageMove::Kind::devices:
      return "other devices";
    case StageMove::Kind::cuts:
      break;
  }
  return "other cuts";
}

std::string move_text(const StageMove& move, std::int64_t steps_before) {
  std::string out = fmt::format("Last change at step {}, {}", move.step + steps_before, name_of(move.kind));
  if (move.from_cuts != move.to_cuts || move.from_order != move.to_order) {
    out += fmt::format(": cuts [{}] on devices [{}] to [{}] on [{}], {} moved", fmt::join(move.from_cuts, ", "),
                       fmt::join(move.from_order, ", "), fmt::join(move.to_cuts, ", "), fmt::join(move.to_order, ", "),
                       bytes_text(move.moved_bytes));
  }
  if (move.seconds_before > 0.0) {
    const double percent = 100.0 * (1.0 - move.seconds_after / move.seconds_before);
    out += fmt::format(", steps {:.1f} % {}", std::abs(percent), percent >= 0.0 ? "shorter" : "longer");
  }
  return out + fmt::format(", because of this: {}.\n", move.reason);
}

}  // namespace

std::string StageBalancer::explain(std::int64_t steps_before) const {
  const State& state = *state_;
  if (state.batch_size == 0 || state.stages_invalid) return "Nothing is planned yet.\n";
  const std::int64_t usual = usual_batch_size(state.batch_sizes);
  const std::int64_t items = state.plans.contains(usual) ? usual : state.batch_size;
  const ActiveProblem problem = state.active(items);
  const plan::StagePlan now = state.evaluate(problem, state.plans.at(items).plan);
  const double per_micro_batch = static_cast<double>(items) / static_cast<double>(now.sizes.front());
  std::vector<double> busy;
  double sum = 0.0;
  for (const plan::StageTimes& times : now.times) {
    busy.push_back((times.forward + times.backward) * per_micro_batch);
    sum += busy.back();
  }
  const auto stages = static_cast<double>(busy.size());
  std::string out = fmt::format(
      "{} on {} of {}, a batch of {} in {}; a step takes {:.4g} s by prediction, {:.4g} s if all devices were always "
      "busy; bubble {:.1f} %; {} measured, {}\n",
      plural(busy.size(), "stage"), busy.size(), plural(problem.devices.size(), "device"), items,
      plural(now.sizes.size(), "micro-batch", "micro-batches"), now.seconds, now.ideal_seconds,
      100.0 * std::max(0.0, 1.0 - sum / (stages * now.seconds)), plural(state.step + steps_before, "step"),
      plural(state.moves, "move"));
  for (std::size_t i = 0; i < busy.size(); ++i) {
    const plan::StageDevice& device = problem.problem.devices[problem.local(now.order[i])];
    const std::size_t end = i + 1 < busy.size() ? now.cuts[i + 1] : state.given.blocks.size();
    const double scale = state.given.devices[now.order[i]].speed / device.speed;
    const std::string cap = device.memory_bytes == plan::StageDevice::kUnlimitedBytes
                                ? ""
                                : fmt::format(" of {}", bytes_text(device.memory_bytes));
    out += fmt::format(
        "  stage {} on {}: {} from {}, busy {:.1f} % of the step, {} in flight, {}{}; takes {:.2f} times what was "
        "measured at first (+-{:.1f} %), noise of an action {:.1f} %\n",
        i, device.name, plural(end - now.cuts[i], "block"), now.cuts[i], 100.0 * busy[i] / now.seconds,
        plural(plan::in_flight(now.schedule, i), "micro-batch", "micro-batches"), bytes_text(now.bytes[i]), cap, scale,
        100.0 * state.knowledge.error(now.order[i]), 100.0 * device.noise);
  }
  const auto pace = static_cast<std::size_t>(std::ranges::max_element(busy) - busy.begin());
  out += fmt::format("Stage {} on {} sets the pace.\n", pace, state.given.devices[now.order[pace]].name);
  if (now.sizes.size() == 1 && busy.size() > 1) {
    out += "With one micro-batch no two devices work at once: the stages hold what one device could not.\n";
  }
  const auto fastest = std::ranges::max_element(problem.problem.devices, {}, &plan::StageDevice::speed);
  ActiveProblem more = problem;
  more.problem.devices.push_back(*fastest);
  more.devices.push_back(state.given.devices.size());
  plan::StageOptions with = state.wanted(more);
  with.cuts.clear();
  with.order.clear();
  out += fmt::format("One more device like {} {}", fastest->name,
                     gain_text(now.seconds, state.search(more, with).seconds));
  if (const auto count = static_cast<std::int64_t>(now.sizes.size()); count < items) {
    with = state.fixed(problem);
    with.micro_batches = count + 1;
    try {
      const std::string gain = gain_text(now.seconds, state.search(problem, with).seconds);
      out += fmt::format("; one more micro-batch {}", gain);
    } catch (const OutOfMemory&) {
      out += "; one more micro-batch does not fit in memory";
    }
  }
  out += ".\n";
  if (items == state.batch_size && state.better && state.better->gain > 0.0) {
    const State::Promise& better = *state.better;
    const double price = state.price(better.plan.moved_bytes);
    out += fmt::format("Cuts [{}] on devices [{}] {}; a move must promise {:.1f} %", fmt::join(better.plan.cuts, ", "),
                       fmt::join(better.plan.order, ", "), gain_text(now.seconds, better.plan.seconds),
                       100.0 * better.required / now.seconds);
    if (price > 0.0)
      out += fmt::format(" and costs {:.4g} s, of which steps have lost {:.4g} s so far", price, state.regret);
    out += ".\n";
  }
  if (state.try_at > 0) {
    out += state.proven
               ? fmt::format("Memory ran out before. Now all of it is tried again.\n")
               : fmt::format("Memory ran out. More of it is tried again at step {}.\n", state.try_at + steps_before);
  }
  return state.recent.empty() ? out : out + move_text(state.recent.back(), steps_before);
}

}  // namespace paceline::balance
