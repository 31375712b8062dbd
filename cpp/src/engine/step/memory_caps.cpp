// SPDX-License-Identifier: Apache-2.0
#include "engine/step/memory_caps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include <paceline/error.hpp>
#include <paceline/plan/corrections.hpp>

#include "plan/batch/monotone.hpp"
#include "plural.hpp"

namespace paceline::internal {
namespace {

constexpr std::size_t kMostKinds = 64;     // for each device; the length of a sequence makes a kind
constexpr double kFirstPart = 1.0 / 16.0;  // of a claim is the first size that is measured
constexpr double kAny = std::numeric_limits<double>::infinity();

std::optional<std::uint64_t> key_of(const BatchPlan& plan) {
  return plan.by_cost() ? std::nullopt : std::optional(plan.kind.memory);
}

/// The end of the longest run of items from `begin` on whose size is at most `most`, moved to the nearest place that
/// leaves `least` items on both sides.
std::int64_t end_of(const BatchPlan& plan, std::int64_t begin, std::int64_t end, double most, std::int64_t least = 1) {
  const std::int64_t items = plan::last_that_fits(std::int64_t{0}, end - begin + 1, [&](std::int64_t count) {
    return plan.memory_size(begin, begin + count) <= most;
  });
  return begin + plan::fitting_piece(items, end - begin, least);
}

template <class Kinds, class Key>
auto* find(Kinds& kinds, const Key& key) {
  const auto found = std::ranges::find(kinds, key, [](const auto& entry) { return entry.first; });
  return found == kinds.end() ? nullptr : &found->second;
}

template <class Kinds>
void make_room(Kinds& kinds) {
  if (kinds.size() >= kMostKinds) kinds.erase(kinds.begin());
}

}  // namespace

MemoryCaps::MemoryCaps(const DeviceGroup& group, const std::vector<std::int64_t>& limits) {
  if (!limits.empty() && limits.size() != group.size()) {
    throw InvalidArgument(fmt::format("memory limits: {} for {}; give one for each, 0 for none, or leave them out.",
                                      limits.size(), plural(group.size(), "device")));
  }
  for (const DeviceId id : group.ids()) {
    const Device& device = group.device(id);
    const std::int64_t limit = limits.empty() ? 0 : limits[devices_.size()];
    if (limit < 0) {
      throw InvalidArgument(
          fmt::format("memory limits: {} bytes for {}; give more than 0, or 0 for none.", limit, device.name),
          device.name);
    }
    devices_.add(id, {.name = device.name, .space = device.memory_space, .limit = limit, .models = {}});
  }
  any_limit_ = std::ranges::any_of(devices_, [](const auto& entry) { return entry.value.limit > 0; });
}

/// The largest size for batches of that kind since memory ran out.
double MemoryCaps::cap(const DeviceState& device, Key key) const {
  double most = kAny;
  for (const std::string* const name : {&device.space, &device.name}) {
    const auto caps = caps_.find(*name);
    if (caps == caps_.end()) continue;
    if (const Cap* const known = find(caps->second, key)) most = std::min(most, known->most());
  }
  return most;
}

bool MemoryCaps::wants_more(DeviceId device, const BatchPlan& plan) const {
  const DeviceState& here = devices_[device];
  if (here.limit == 0) return false;
  const std::lock_guard lock(mutex_);
  const balance::MemoryModel* const known = find(here.models, key_of(plan));
  return known == nullptr || known->wants_more();
}

/// The first size is small. The next is twice that, or one item more if twice is not certain to fit, because a failure
/// costs a repetition of the step.
std::optional<std::int64_t> MemoryCaps::end_to_measure(DeviceId device, const BatchPlan& plan, std::int64_t begin,
                                                       std::int64_t end, std::int64_t least) {
  if ((end - begin) / 2 < least || !wants_more(device, plan)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const DeviceState& here = devices_[device];
  const Key key = key_of(plan);
  const balance::MemoryModel* const known = find(here.models, key);
  const std::optional<double> largest = known != nullptr ? known->largest() : std::nullopt;
  std::int64_t middle = 0;
  if (!largest) {
    middle = end_of(plan, begin, end, kFirstPart * plan.memory_size(begin, end));
  } else if (known->most(here.limit).value_or(kAny) >= 2.0 * *largest) {
    middle = end_of(plan, begin, end, 2.0 * *largest);
  } else {
    middle = std::min(end, end_of(plan, begin, end, *largest) + 1);
  }
  middle = end_of(plan, begin, middle, cap(here, key));
  return begin + plan::fitting_piece(middle - begin, end - begin, least);
}

bool MemoryCaps::measured(DeviceId device, const BatchPlan& plan, std::int64_t begin, std::int64_t end,
                          std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const Key key = key_of(plan);
  Kinds<balance::MemoryModel>& models = devices_[device].models;
  if (find(models, key) == nullptr) {
    make_room(models);
    models.emplace_back(key, balance::MemoryModel());
  }
  balance::MemoryModel& known = *find(models, key);
  const auto before = std::pair(known.sizes(), known.largest());
  known.add(plan.memory_size(begin, end), bytes);
  return before != std::pair(known.sizes(), known.largest());
}

std::vector<std::pair<std::int64_t, std::int64_t>> MemoryCaps::pieces(DeviceId device, const BatchPlan& plan,
                                                                      std::int64_t begin, std::int64_t end,
                                                                      std::int64_t least) const {
  double most = kAny;
  {
    const std::lock_guard lock(mutex_);
    const DeviceState& here = devices_[device];
    const balance::MemoryModel* const known = find(here.models, key_of(plan));
    if (here.limit > 0 && known != nullptr) most = known->most(here.limit).value_or(kAny);
    most = std::min(most, cap(here, key_of(plan)));
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t next = most < kAny ? end_of(plan, at, end, most, least) : end;
    pieces.emplace_back(at, next);
    at = next;
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> even;
  const std::int64_t count = std::ssize(pieces);
  for (std::int64_t k = 0; k < count; ++k) {
    even.emplace_back(begin + (end - begin) * k / count, begin + (end - begin) * (k + 1) / count);
    if (plan.memory_size(even.back().first, even.back().second) > most) return pieces;
  }
  return even;
}

bool MemoryCaps::shrink(DeviceId device, const BatchPlan& plan, std::int64_t begin, std::int64_t end,
                        std::int64_t least, bool limited) {
  const std::lock_guard lock(mutex_);
  const DeviceState& here = devices_[device];
  const Key key = key_of(plan);
  const double size = plan.memory_size(begin, end);
  // A piece that was larger than the cap is already the smallest possible one.
  if (end - begin <= least || size > cap(here, key)) return false;
  Kinds<Cap>& caps = caps_[limited ? here.name : here.space];
  std::erase_if(caps, [&](const auto& entry) { return entry.first == key; });
  make_room(caps);
  caps.emplace_back(key, Cap{size, limited ? "it reached its limit" : here.name + " ran out of memory"});
  any_cap_ = true;
  return true;
}

std::vector<MemoryReport> MemoryCaps::report() const {
  const std::lock_guard lock(mutex_);
  std::vector<MemoryReport> reports;
  for (const auto& [id, device] : devices_) {
    if (device.limit == 0) continue;
    MemoryReport& report = reports.emplace_back(MemoryReport{.device = device.name, .limit_bytes = device.limit});
    for (const auto& [key, known] : device.models) {
      if (known.sizes() == 0) continue;
      const std::optional<double> fits = known.most(device.limit);
      const double most = std::min(fits.value_or(kAny), cap(device, key));
      if (!key) {
        report.costs = {.fixed_bytes = known.fixed_bytes(), .bytes_per_cost = known.bytes_per_size()};
        if (fits) report.costs->largest_padded_cost = most;
      } else if (!report.items || known.bytes_per_size() > report.items->bytes_per_item) {
        report.items = {.fixed_bytes = known.fixed_bytes(), .bytes_per_item = known.bytes_per_size()};
        if (fits) report.items->largest_micro_batch = std::max<std::int64_t>(1, static_cast<std::int64_t>(most));
      }
    }
  }
  return reports;
}

std::string MemoryCaps::explain() const {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, caps] : caps_) {
      const Cap* least = nullptr;
      std::ptrdiff_t others = -1;
      for (const auto& [key, known] : caps) {
        if (!key) continue;
        ++others;
        if (least == nullptr || known.size < least->size) least = &known;
      }
      if (least != nullptr) {
        text += fmt::format(
            "{}: at most {} at once, since {} with {:.0f}{}.\n", name,
            plural(static_cast<std::int64_t>(least->most()), "item"), least->why, least->size,
            others > 0 ? fmt::format("; items of {} have caps of their own", plural(others, "other shape")) : "");
      }
      if (const Cap* const known = find(caps, Key())) {
        text +=
            fmt::format("{}: a cost of at most {:.6g} at once, items counted as the longest, since {} with {:.6g}.\n",
                        name, known->most(), known->why, known->size);
      }
    }
  }
  for (const MemoryReport& device : report()) {
    if (device.items && device.items->largest_micro_batch) {
      text += fmt::format(
          "{}: at most {} at once in {} bytes: a micro-batch takes {:.0f} bytes and {:.0f} for each item.\n",
          device.device, plural(*device.items->largest_micro_batch, "item"), device.limit_bytes,
          device.items->fixed_bytes, device.items->bytes_per_item);
    }
    if (device.costs && device.costs->largest_padded_cost) {
      text += fmt::format(
          "{}: a cost of at most {:.6g} at once, items counted as the longest, in {} bytes: a micro-batch "
          "takes {:.0f} bytes and {:.4g} for each unit.\n",
          device.device, *device.costs->largest_padded_cost, device.limit_bytes, device.costs->fixed_bytes,
          device.costs->bytes_per_cost);
    }
  }
  return text;
}

}  // namespace paceline::internal
