// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "plan/pool/state.hpp"

namespace paceline::plan {

using State = PoolState::State;

double State::peak(std::size_t kind, std::int64_t size) const {
  const PoolKind& spec = kinds[kind].spec;
  return spec.peak_bytes + spec.peak_bytes_per_item * static_cast<double>(size);
}

// The largest batch of a kind on a new device, or of a new kind.
void State::add_largest(std::size_t kind, std::size_t device) {
  Kind& of = kinds[kind];
  const double bytes = spaces[devices[device].space].bytes - options.memory_margin_bytes -
                       (of.model == kNone ? 0.0 : models[of.model].bytes);
  const auto fits = [&](std::int64_t size) { return bytes == kNever || peak(kind, size) <= bytes; };
  const auto above = std::ranges::partition_point(of.spec.sizes, fits);
  of.largest.push_back(above == of.spec.sizes.begin() ? 0 : *(above - 1));
}

// How many devices of one memory can run the kind at once, one job each.
std::int64_t State::together(std::size_t kind, std::size_t space) const {
  const std::size_t model = kinds[kind].model;
  const double free = spaces[space].bytes - options.memory_margin_bytes - (model == kNone ? 0.0 : models[model].bytes);
  const double count = free / peak(kind, 1);  // NaN, if both are infinite or 0: no limit
  return count < static_cast<double>(devices.size()) ? static_cast<std::int64_t>(count) : std::ssize(devices);
}

bool State::resident(std::size_t model, std::size_t space) const {
  const std::vector<Resident>& all = spaces[space].residents;
  return std::any_of(all.begin(), all.end(), [&](const Resident& one) { return one.model == model; });
}

double State::used(std::size_t space) const {
  double bytes = 0.0;
  for (const Resident& one : spaces[space].residents) bytes += models[one.model].bytes;
  for (const Device& device : devices) {
    if (device.space == space && device.run != RunId{}) bytes += run_of(device).peak_bytes;
  }
  return bytes;
}

// The models to evict so that a batch fits: weights of all that stay + the largest peak of these + the peaks of what
// runs beside it + margin <= bytes. None if it does not fit. GreedyDual-Size (Cao & Irani, 1997): the model goes whose
// reload costs least per byte, and what was not used for long loses value.
std::optional<std::vector<std::size_t>> State::room(std::size_t kind, std::size_t device, std::int64_t size) const {
  std::vector<std::size_t> evict;
  const std::size_t index = devices[device].space;
  const Space& space = spaces[index];
  if (space.bytes == kNever) return evict;
  double used_bytes = options.memory_margin_bytes;
  std::vector<std::size_t> busy{kinds[kind].model};
  for (const Device& other : devices) {
    if (other.space != index || other.run == RunId{}) continue;
    used_bytes += run_of(other).peak_bytes;
    busy.push_back(kinds[run_of(other).kind].model);
  }
  if (kinds[kind].model != kNone && !resident(kinds[kind].model, index)) used_bytes += models[kinds[kind].model].bytes;
  std::vector<Resident> stay = space.residents;
  for (;;) {
    double bytes = used_bytes;
    double most = peak(kind, size);
    auto least = stay.end();
    for (auto one = stay.begin(); one != stay.end(); ++one) {
      bytes += models[one->model].bytes;
      if (std::find(busy.begin(), busy.end(), one->model) != busy.end()) continue;
      most = std::max(most, one->peak_bytes);
      if (least == stay.end() || one->value < least->value) least = one;
    }
    if (bytes + most <= space.bytes) return evict;
    if (least == stay.end()) return std::nullopt;
    evict.push_back(least->model);
    stay.erase(least);
  }
}

// Requires that room() found some. Returns the seconds of the load.
double State::take_room(std::size_t kind, std::size_t device, std::int64_t size, PoolStart& start) {
  Space& space = spaces[devices[device].space];
  for (const std::size_t model : room(kind, device, size).value_or(std::vector<std::size_t>{})) {
    const auto gone = std::find_if(space.residents.begin(), space.residents.end(),
                                   [&](const Resident& one) { return one.model == model; });
    space.level = std::max(space.level, gone->value);
    space.residents.erase(gone);
    start.evict.push_back({device, models[model].name});
    ++epoch;
  }
  const std::size_t own = kinds[kind].model;
  if (own == kNone) return 0.0;
  const double load = load_seconds(kind, device);
  auto place = std::find_if(space.residents.begin(), space.residents.end(),
                            [&](const Resident& one) { return one.model == own; });
  if (place == space.residents.end()) {
    place = space.residents.insert(place, {.model = own});
    ++epoch;
  }
  place->value = space.level + models[own].reload_seconds / std::max(models[own].bytes, 1.0);
  place->peak_bytes = std::max(place->peak_bytes, peak(kind, size));
  return load;
}

}  // namespace paceline::plan
