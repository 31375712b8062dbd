// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <optional>
#include <variant>
#include <vector>

#include <paceline/error.hpp>

namespace paceline::python {

/// None, one value for all devices, or one per device.
template <class Value>
using PerDevice = std::optional<std::variant<Value, std::vector<Value>>>;

/// Calls set(device, value) for every device, or not at all for None.
template <class Value, class Set>
void for_each_device(const PerDevice<Value>& given, std::size_t device_count, const char* name, const Set& set) {
  if (!given) return;
  if (const auto* all = std::get_if<0>(&*given)) {
    for (std::size_t i = 0; i < device_count; ++i) set(i, *all);
    return;
  }
  const std::vector<Value>& each = std::get<1>(*given);
  if (each.size() != device_count) {
    throw InvalidArgument(
        fmt::format("{} is of length {} instead of {}; pass one per device, or one value for all of them", name,
                    each.size(), device_count));
  }
  for (std::size_t i = 0; i < device_count; ++i) set(i, static_cast<Value>(each[i]));
}

}  // namespace paceline::python
