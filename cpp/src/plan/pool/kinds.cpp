// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <utility>

#include "plan/pool/state.hpp"
#include "refuse.hpp"

namespace paceline::plan {

using State = PoolState::State;

void State::refuse_kind(std::size_t kind) const {
  require(kind < kinds.size(), "kind {} is not in the pool, which has {}", kind, kinds.size());
  refuse("kind {} is forgotten; add it again", kind);
}

// Lets go of all that is kept for a kind of which nothing waits or runs.
bool State::forget(std::size_t kind) {
  const auto runs = [&](const Device& device) { return device.run != RunId{} && run_of(device).kind == kind; };
  if (kinds[kind].held > 0 || std::ranges::any_of(devices, runs)) return false;
  const auto begin = line_index.lower_bound({kind, 0, 0, false});
  auto end = begin;
  for (; end != line_index.end() && std::get<0>(end->first) == kind; ++end) {
    free_lines.push_back(end->second);
    lines[end->second] = {};
  }
  line_index.erase(begin, end);
  const std::size_t model = kinds[kind].model;
  Kind gone{.forgotten = true};
  gone.on.resize(devices.size());
  gone.classes.resize(classes.size());
  gone.largest.resize(devices.size());
  kinds[kind] = std::move(gone);
  if (model == kNone || std::ranges::count(kinds, model, &Kind::model) > 0) return true;
  models[model] = {};
  for (Space& space : spaces) std::erase_if(space.residents, [&](const Resident& one) { return one.model == model; });
  ++epoch;
  return true;
}

std::size_t PoolState::add_kind(PoolKind kind) {
  State& s = *state_;
  const std::vector<std::int64_t>& sizes = kind.sizes;
  require(!sizes.empty() && sizes.front() == 1 && std::is_sorted(sizes.begin(), sizes.end(), std::less_equal<>()),
          "sizes of kind '{}' must ascend from 1: what is left over runs alone", kind.name);
  for (const double value :
       {kind.max_delay_seconds, kind.resident_bytes, kind.reload_seconds, kind.peak_bytes, kind.peak_bytes_per_item}) {
    require(finite_not_negative(value), "kind '{}' has a {}; its seconds and bytes must be finite and not negative",
            kind.name, value);
  }
  require(kind.queue_limit >= 0, "queue_limit of kind '{}' is {}; it cannot be negative", kind.name, kind.queue_limit);
  require(!kind.model.empty() || kind.resident_bytes + kind.reload_seconds <= 0.0,
          "kind '{}' has resident bytes or a reload, so it needs the name of a model", kind.name);
  State::Kind made{.spec = std::move(kind), .margin = s.options.margin};
  if (!made.spec.model.empty()) {
    auto found = std::ranges::find(s.models, made.spec.model, &State::Model::name);
    if (found == s.models.end()) found = std::ranges::find(s.models, "", &State::Model::name);  // free
    if (found == s.models.end()) found = s.models.emplace(found);
    made.model = static_cast<std::size_t>(found - s.models.begin());
    State::Model& model = s.models[made.model];
    const bool fresh = model.name.empty();
    if (fresh)
      model = {.name = made.spec.model, .bytes = made.spec.resident_bytes, .reload_seconds = made.spec.reload_seconds};
    require(
        model.bytes == made.spec.resident_bytes && (model.loaded || model.reload_seconds == made.spec.reload_seconds),
        "model '{}' has {} bytes and reloads in {} s; kind '{}' says otherwise", model.name, model.bytes,
        model.reload_seconds, made.spec.name);
  }
  made.on.resize(s.devices.size());
  made.classes.resize(s.classes.size());
  auto place = std::ranges::find(s.kinds, true, &State::Kind::forgotten);
  if (place == s.kinds.end()) place = s.kinds.emplace(place);
  *place = std::move(made);
  const auto number = static_cast<std::size_t>(place - s.kinds.begin());
  for (std::size_t d = 0; d < s.devices.size(); ++d) s.add_largest(number, d);
  if (s.ledger != nullptr) s.ledger->add_kind(place->spec);
  return number;
}

bool PoolState::forget(std::size_t kind) {
  State& s = *state_;
  (void)s.kind_at(kind);
  if (!s.forget(kind)) return false;
  if (s.ledger != nullptr) s.ledger->forget(kind);
  return true;
}

bool PoolState::unload(std::size_t device, const std::string& model) {
  State& s = *state_;
  require(device < s.devices.size(), "device {} is not in the pool, which has {}", device, s.devices.size());
  const std::size_t space = s.devices[device].space;
  const auto is_it = [&](std::size_t number) { return number != kNone && s.models[number].name == model; };
  const auto runs = [&](const State::Device& one) {
    return one.space == space && one.run != RunId{} && is_it(s.kinds[s.run_of(one).kind].model);
  };
  if (std::ranges::any_of(s.devices, runs)) return false;
  if (std::erase_if(s.spaces[space].residents, [&](const State::Resident& one) { return is_it(one.model); }) == 0)
    return false;
  ++s.epoch;
  if (s.ledger != nullptr) s.ledger->unload(device, model);
  return true;
}

}  // namespace paceline::plan
