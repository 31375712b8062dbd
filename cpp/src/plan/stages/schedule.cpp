// SPDX-License-Identifier: Apache-2.0
#include <paceline/plan/schedule.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <vector>

#include "plan/numbers.hpp"
#include "plan/stages/dataflow.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

using Kind = Action::Kind;

void check_sizes(std::size_t stages, std::int64_t micro_batches) {
  if (stages == 0) refuse("a schedule needs at least one stage");
  if (micro_batches < 1) refuse("micro_batches is {}; a schedule needs at least one micro-batch", micro_batches);
}

std::string word(const Action& action) {
  return fmt::format("{}{}", action.kind == Kind::forward ? 'F' : 'B', action.micro_batch);
}

[[noreturn]] void refuse_action(std::size_t stage, const Action& action, const char* why) {
  refuse("stage {}, action {}: {}", stage, word(action), why);
}

/// Checks the actions of each stage without the others. Returns whether the schedule has backwards.
bool check_actions(const Schedule& schedule) {
  check_sizes(schedule.stages.size(), schedule.micro_batches);
  const auto count = static_cast<std::size_t>(schedule.micro_batches);
  const bool trains = schedule.stages[0].size() != count;
  for (std::size_t stage = 0; stage < schedule.stages.size(); ++stage) {
    std::vector<char> forwards(count, 0);
    std::vector<char> backwards(count, 0);
    for (const Action& action : schedule.stages[stage]) {
      if (action.micro_batch < 0 || action.micro_batch >= schedule.micro_batches)
        refuse_action(stage, action, "there is no such micro-batch");
      const auto batch = static_cast<std::size_t>(action.micro_batch);
      if (action.kind == Kind::forward) {
        if (forwards[batch]++ != 0) refuse_action(stage, action, "it is there twice; a stage runs each forward once");
      } else {
        if (forwards[batch] == 0) refuse_action(stage, action, "it comes before the forward of its micro-batch");
        if (backwards[batch]++ != 0) refuse_action(stage, action, "it is there twice; a stage runs each backward once");
      }
    }
    for (std::size_t batch = 0; batch < count; ++batch) {
      const auto index = static_cast<std::int64_t>(batch);
      if (forwards[batch] == 0)
        refuse_action(stage, {Kind::forward, index}, "it is missing; a stage runs each forward once");
      if (trains && backwards[batch] == 0)
        refuse_action(stage, {Kind::backward, index},
                      "it is missing; a stage runs each backward once, or no stage runs any");
      if (!trains && backwards[batch] != 0)
        refuse_action(stage, {Kind::backward, index},
                      "stage 0 runs no backward; all stages run backwards, or none does");
    }
  }
  return trains;
}

}  // namespace

std::vector<FlowAction> dataflow(const Schedule& schedule) {
  check_actions(schedule);
  const std::size_t stages = schedule.stages.size();
  const auto count = static_cast<std::size_t>(schedule.micro_batches);
  std::vector<FlowAction> flow;
  std::vector<std::vector<char>> forwards(stages, std::vector<char>(count, 0));  // that have run
  std::vector<std::vector<char>> backwards = forwards;
  std::vector<std::size_t> next(stages, 0);
  // Stages that may be able to go on. A stage is looked at again when a neighbour has run an action for it, so the work
  // is linear in the number of actions.
  std::vector<std::size_t> pending;
  for (std::size_t stage = stages; stage-- > 0;) pending.push_back(stage);
  while (!pending.empty()) {
    const std::size_t stage = pending.back();
    pending.pop_back();
    for (; next[stage] < schedule.stages[stage].size(); ++next[stage]) {
      const Action& action = schedule.stages[stage][next[stage]];
      const bool forward = action.kind == Kind::forward;
      const auto batch = static_cast<std::size_t>(action.micro_batch);
      const bool last = stage + 1 == stages;
      // check_actions() has seen that a stage runs a forward before its backward.
      if (forward && stage > 0 && forwards[stage - 1][batch] == 0) break;
      if (!forward && !last && backwards[stage + 1][batch] == 0) break;
      (forward ? forwards : backwards)[stage][batch] = 1;
      flow.push_back({stage, next[stage], batch, forward});
      if (forward ? !last : stage > 0) pending.push_back(forward ? stage + 1 : stage - 1);
    }
  }
  for (std::size_t stage = 0; stage < stages; ++stage) {
    if (next[stage] < schedule.stages[stage].size())
      refuse_action(
          stage, schedule.stages[stage][next[stage]],
          "it never starts: what it waits for waits for a later action of this stage; begin more forwards before "
          "the first backward on the stages before");
  }
  return flow;
}

Schedule schedule_of_depths(std::span<const std::int64_t> depths, std::int64_t micro_batches) {
  check_sizes(depths.size(), micro_batches);
  Schedule schedule{micro_batches, {}};
  for (std::size_t stage = 0; stage < depths.size(); ++stage) {
    if (depths[stage] < 1 || (stage > 0 && depths[stage] > depths[stage - 1]))
      refuse("depths[{}] is {}; depths are at least 1, and no stage has more in flight than the one before it", stage,
             depths[stage]);
    const std::int64_t depth = std::min(depths[stage], micro_batches);
    std::vector<Action>& actions = schedule.stages.emplace_back();
    for (std::int64_t i = 0; i < depth; ++i) actions.push_back({Kind::forward, i});
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      actions.push_back({Kind::backward, i});
      if (i + depth < micro_batches) actions.push_back({Kind::forward, i + depth});
    }
  }
  return schedule;
}

Schedule gpipe(std::size_t stages, std::int64_t micro_batches) {
  return schedule_of_depths(std::vector<std::int64_t>(stages, std::max<std::int64_t>(micro_batches, 1)), micro_batches);
}

Schedule one_f_one_b(std::size_t stages, std::int64_t micro_batches, std::span<const std::int64_t> extra) {
  check_sizes(stages, micro_batches);
  if (!extra.empty() && extra.size() != stages)
    refuse("extra has {}, but there are {}", plural(extra.size(), "number"), plural(stages, "stage"));
  std::vector<std::int64_t> depths(stages, 0);
  std::int64_t behind = 0;
  for (std::size_t stage = stages; stage-- > 0;) {
    const std::int64_t more = extra.empty() ? 0 : extra[stage];
    if (more < 0) refuse("extra[{}] is {}; it cannot be negative", stage, more);
    const auto plain = static_cast<std::int64_t>(stages - stage);
    // plain + more could overflow; beyond micro_batches it makes no difference.
    behind = std::max(behind, plain + std::min(more, micro_batches));
    depths[stage] = behind;
  }
  return schedule_of_depths(depths, micro_batches);
}

Schedule forward_only(std::size_t stages, std::int64_t micro_batches) {
  check_sizes(stages, micro_batches);
  std::vector<Action> actions;
  for (std::int64_t i = 0; i < micro_batches; ++i) actions.push_back({Kind::forward, i});
  return {micro_batches, std::vector<std::vector<Action>>(stages, actions)};
}

std::int64_t in_flight(const Schedule& schedule, std::size_t stage) {
  if (stage >= schedule.stages.size()) refuse("there is no stage {} among {}", stage, schedule.stages.size());
  const auto is_backward = [](const Action& action) { return action.kind == Kind::backward; };
  if (std::ranges::none_of(schedule.stages[stage], is_backward)) return 0;
  std::int64_t now = 0;
  std::int64_t most = 0;
  for (const Action& action : schedule.stages[stage]) {
    now += action.kind == Kind::forward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

void check(const Schedule& schedule) { (void)dataflow(schedule); }

std::string to_text(const Schedule& schedule) {
  std::string text;
  for (const std::vector<Action>& actions : schedule.stages) {
    if (!text.empty()) text += '\n';
    for (std::size_t i = 0; i < actions.size(); ++i) {
      if (i > 0) text += ' ';
      text += word(actions[i]);
    }
  }
  return text;
}

Schedule schedule_of(std::string_view text) {
  Schedule schedule;
  std::size_t line_number = 0;
  for (std::size_t from = 0; from <= text.size();) {
    const std::size_t end = std::min(text.find('\n', from), text.size());
    const std::string_view line = text.substr(from, end - from);
    from = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    std::vector<Action>& actions = schedule.stages.emplace_back();
    for (std::size_t at = line.find_first_not_of(" \t\r"); at != std::string_view::npos;) {
      const std::size_t stop = std::min(line.find_first_of(" \t\r", at), line.size());
      const std::string_view token = line.substr(at, stop - at);
      Action action;
      const auto [rest, error] = std::from_chars(token.data() + 1, token.data() + token.size(), action.micro_batch);
      const bool known = token[0] == 'F' || token[0] == 'B';
      if (!known || error != std::errc() || rest != token.data() + token.size() || action.micro_batch == kMostInt64)
        refuse(
            "line {} of the schedule: '{}' is no action; write F or B and the number of a micro-batch, as in 'F0 B0'",
            line_number, token);
      action.kind = token[0] == 'F' ? Kind::forward : Kind::backward;
      actions.push_back(action);
      schedule.micro_batches = std::max(schedule.micro_batches, action.micro_batch + 1);
      at = line.find_first_not_of(" \t\r", stop);
    }
  }
  // A number far beyond the number of actions would only cost memory before check() finds what is missing.
  if (!schedule.stages.empty() && schedule.micro_batches > static_cast<std::int64_t>(schedule.stages[0].size()))
    refuse("the schedule names micro-batch {}, but its first stage has only {}", schedule.micro_batches - 1,
           plural(schedule.stages[0].size(), "action"));
  check(schedule);
  return schedule;
}

}  // namespace paceline::plan
