// SPDX-License-Identifier: Apache-2.0
#include "item_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include <paceline/error.hpp>

#include "counted.hpp"

namespace paceline::plan::detail {
namespace {

constexpr std::size_t kMostItems = std::size_t{1} << 31;

void require_number(double value, const char* what, std::size_t i) {
  if (std::isfinite(value) && value >= 0.0) return;
  throw InvalidArgument(fmt::format("{} at {} is {}; it must be finite and not negative", what, i, value));
}

void require_cap(double value, const char* what, std::size_t device) {
  if (value >= 0.0) return;
  throw InvalidArgument(fmt::format("the cap on {} of device {} is {}; it must not be negative, infinity means none",
                                    what, device, value));
}

double sum_of(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// Shortest form; integers without a fraction.
std::string number(double value) { return fmt::format("{:.9g}", value); }

void require_sum(double needed, double held, const char* what, std::size_t devices) {
  if (needed <= held) return;
  throw InvalidArgument(
      fmt::format("the items' {} adds up to {}, but the caps on it of the {} to {}; raise "
                  "them, or split fewer items at a time",
                  what, number(needed), counted(devices, "device"), number(held)));
}

void require_room_for_each(const ItemProblem& problem, const ItemOptions& options) {
  const Holding empty;
  for (Rank rank = 0; rank < problem.items(); ++rank) {
    bool room = false;
    for (std::size_t device = 0; device < problem.devices() && !room; ++device)
      room = empty.has_room(problem, device, rank);
    if (room) continue;
    double cost = 0.0;
    double memory = 0.0;
    for (const ItemCaps& cap : options.caps) {
      if (cap.items == 0) continue;
      cost = std::max(cost, cap.cost);
      memory = std::max(memory, cap.memory);
    }
    throw InvalidArgument(fmt::format(
        "item {} has cost {} and memory {} and fits no device, even alone; the largest caps are {} on cost and {} on "
        "memory. Raise one device's caps above the item, or shorten the item or leave it out",
        problem.order[rank], number(problem.cost[rank]), number(problem.memory_of(rank)), number(cost),
        number(memory)));
  }
}

}  // namespace

void validate_items(std::span<const double> costs, std::span<const LoadModel> models, const ItemOptions& options) {
  if (models.empty()) throw InvalidArgument("items cannot be split over no devices; pass one model per device");
  if (costs.size() >= kMostItems)
    throw InvalidArgument(fmt::format("{} items are more than a split takes", costs.size()));
  if (!(options.tolerance >= 0.0)) {
    throw InvalidArgument(
        fmt::format("tolerance is {}; the gap to be content with must not be negative", options.tolerance));
  }
  if (options.search_steps < 0) {
    throw InvalidArgument(fmt::format("search_steps is {}; it must not be negative", options.search_steps));
  }
  if (!options.caps.empty() && options.caps.size() != models.size()) {
    throw InvalidArgument(fmt::format("caps has {} for {}; pass one per device, or none",
                                      counted(options.caps.size(), "entry", "entries"),
                                      counted(models.size(), "device")));
  }
  if (!options.memory.empty() && options.memory.size() != costs.size()) {
    throw InvalidArgument(fmt::format("memory has {} for {}; pass one per item, or none",
                                      counted(options.memory.size(), "entry", "entries"),
                                      counted(costs.size(), "item")));
  }
  double total = 0.0;
  for (std::size_t i = 0; i < costs.size(); ++i) {
    require_number(costs[i], "cost", i);
    total += costs[i];
  }
  for (std::size_t i = 0; i < options.memory.size(); ++i) require_number(options.memory[i], "memory", i);
  for (std::size_t i = 0; i < models.size(); ++i) {
    require_number(models[i].fixed_seconds, "fixed_seconds", i);
    require_number(models[i].seconds_per_cost, "seconds_per_cost", i);
    if (!std::isfinite(models[i].fixed_seconds + models[i].seconds_per_cost * total)) {
      throw InvalidArgument(
          fmt::format("device {} would need more seconds for all items than a double holds; check the units", i));
    }
  }
  for (std::size_t i = 0; i < options.caps.size(); ++i) {
    const ItemCaps& cap = options.caps[i];
    require_cap(static_cast<double>(cap.items), "items", i);
    require_cap(cap.cost, "cost", i);
    require_cap(cap.memory, "memory", i);
    if (cap.memory < ItemCaps::kAnySum && options.memory.empty() && !costs.empty()) {
      throw InvalidArgument(fmt::format(
          "device {} has a cap of {} on memory, but no memory per item is given; pass memory, one number per item", i,
          number(cap.memory)));
    }
  }
}

void require_room(const ItemProblem& problem, const ItemOptions& options, double lower_bound) {
  if (!problem.capped || problem.items() == 0) return;
  const auto items = static_cast<std::int64_t>(problem.items());
  std::int64_t count = 0;
  double cost = 0.0;
  double memory = 0.0;
  for (const ItemCaps& cap : problem.caps) {
    count = std::min(items, count + std::min(cap.items, items));
    cost += cap.cost;
    memory += cap.memory;
  }
  if (count < items) {
    throw InvalidArgument(fmt::format(
        "{} not fit: the caps on items of the {} add up to {}; raise them, or split at most {} at a time",
        counted(items, "item does", "items do"), counted(problem.devices(), "device"), count, counted(count, "item")));
  }
  require_sum(sum_of(problem.cost), cost, "cost", problem.devices());
  require_sum(sum_of(problem.memory), memory, "memory", problem.devices());
  require_room_for_each(problem, options);
  if (lower_bound == std::numeric_limits<double>::infinity()) {
    throw InvalidArgument(
        "the caps on items and on cost together leave too little room: devices that may have a high cost may not have "
        "enough items to reach it; raise the cap on items of those, or on cost of the others");
  }
}

void throw_not_found(const ItemProblem& problem, const ItemOptions& options, bool proven) {
  std::string used;
  const auto name = [&](bool is_used, const char* what) {
    if (is_used) used += (used.empty() ? "" : ", ") + std::string(what);
  };
  const auto any = [&](const auto& has) { return std::any_of(options.caps.begin(), options.caps.end(), has); };
  name(any([](const ItemCaps& cap) { return cap.items < ItemCaps::kAnyCount; }), "items");
  name(any([](const ItemCaps& cap) { return cap.cost < ItemCaps::kAnySum; }), "cost");
  name(any([](const ItemCaps& cap) { return cap.memory < ItemCaps::kAnySum; }), "memory");
  throw InvalidArgument(
      fmt::format("{} of {} over {} within the caps on {}: in sum there is room, but not for the items as they come; "
                  "raise a cap, or split fewer or smaller items at a time",
                  proven ? "there is no split" : "no split was found", counted(problem.items(), "item"),
                  counted(problem.devices(), "device"), used));
}

}  // namespace paceline::plan::detail
