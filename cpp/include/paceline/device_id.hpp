// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <functional>

namespace paceline {

/// A device of a group: the number that it got when it joined. Numbers are given in order from 0, and never again, so
/// an id means the same device whatever joins or leaves later. It is no place in a list. PerDevice finds values by id,
/// and DeviceGroup::place() says where the device stands in lists with a value per device.
///
/// A literal stands for an id. Any other number must be made one, so that no place in a list becomes an id unnoticed:
///
///   group.device(0);
///   for (const paceline::DeviceId id : group.ids()) std::puts(group.device(id).name.c_str());
class DeviceId {
 public:
  constexpr DeviceId() = default;
  consteval DeviceId(int number) : number_(static_cast<std::size_t>(number)) {}
  constexpr explicit DeviceId(std::size_t number) : number_(number) {}

  [[nodiscard]] constexpr std::size_t number() const noexcept { return number_; }
  friend constexpr auto operator<=>(DeviceId, DeviceId) = default;

 private:
  std::size_t number_ = 0;
};

}  // namespace paceline

template <>
struct std::hash<paceline::DeviceId> {
  [[nodiscard]] std::size_t operator()(paceline::DeviceId id) const noexcept { return id.number(); }
};
