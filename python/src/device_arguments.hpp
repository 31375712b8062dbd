// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

namespace paceline::python {

/// Refuses another number of values than wanted. `each` says what there is one for.
inline void require_size(std::size_t size, std::size_t wanted, const char* name, const char* each) {
  if (size == wanted) return;
  throw InvalidArgument(fmt::format("{} is of length {} instead of {}; pass one per {}", name, size, wanted, each));
}

/// None, one value for all devices, or one per device.
template <class Value>
using DeviceArgument = std::optional<std::variant<Value, std::vector<Value>>>;

/// Calls set(device, value) for every device, or not at all for None.
template <class Value, class Set>
void for_each_device(const DeviceArgument<Value>& given, std::size_t device_count, const char* name, const Set& set) {
  if (!given) return;
  if (const auto* all = std::get_if<0>(&*given)) {
    for (std::size_t i = 0; i < device_count; ++i) set(i, *all);
    return;
  }
  const std::vector<Value>& each = std::get<1>(*given);
  require_size(each.size(), device_count, name, "device, or one value for all of them");
  for (std::size_t i = 0; i < device_count; ++i) set(i, static_cast<Value>(each[i]));
}

/// Combines these arguments into the limits of each device's share.
inline std::vector<plan::ShareLimits> share_limits(std::size_t device_count,
                                                   const DeviceArgument<std::optional<std::int64_t>>& minimum,
                                                   const DeviceArgument<std::optional<std::int64_t>>& maximum,
                                                   const DeviceArgument<bool>& may_be_zero,
                                                   const DeviceArgument<double>& startup_seconds) {
  using plan::ShareLimits;
  std::vector<ShareLimits> limits(device_count);
  for_each_device(minimum, device_count, "minimum",
                  [&](std::size_t i, auto value) { limits[i].minimum = value.value_or(0); });
  for_each_device(maximum, device_count, "maximum",
                  [&](std::size_t i, auto value) { limits[i].maximum = value.value_or(ShareLimits::kUnlimited); });
  for_each_device(may_be_zero, device_count, "may_be_zero",
                  [&](std::size_t i, bool value) { limits[i].may_be_zero = value; });
  for_each_device(startup_seconds, device_count, "startup_seconds",
                  [&](std::size_t i, double value) { limits[i].startup_seconds = value; });
  return limits;
}

}  // namespace paceline::python
