// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/export.hpp>

namespace paceline {

namespace internal {

/// @throws InvalidArgument
[[noreturn]] PACELINE_API void throw_no_device(DeviceId id);

/// The place of `id` in a list that ascends by id; the list's size if it is not there.
template <class List, class IdOf = std::identity>
[[nodiscard]] std::size_t place_of(const List& list, DeviceId id, IdOf id_of = {}) {
  const auto found = std::ranges::lower_bound(list, id, {}, id_of);
  const bool there = found != list.end() && std::invoke(id_of, *found) == id;
  return there ? static_cast<std::size_t>(found - list.begin()) : list.size();
}

}  // namespace internal

/// A value for each of some devices, found by id; in the order of the ids, in one piece of memory.
///
///   paceline::PerDevice<double> seconds(group.ids());
///   seconds[micro_batch.device] += 0.1;
///   for (const auto& [id, value] : seconds) std::printf("%s %.1f s\n", group.device(id).name.c_str(), value);
template <class T>
class PerDevice {
 public:
  struct Entry {
    DeviceId id;
    T value;
  };

  PerDevice() = default;
  explicit PerDevice(std::span<const DeviceId> ids) {
    reserve(ids.size());
    for (const DeviceId id : ids) add(id);
  }
  /// `values`: one for each id.
  PerDevice(std::span<const DeviceId> ids, std::vector<T> values) {
    reserve(ids.size());
    for (std::size_t k = 0; k < ids.size(); ++k) add(ids[k], std::move(values[k]));
  }

  /// Makes room for so many devices, so that add() needs no memory.
  void reserve(std::size_t count) { entries_.reserve(count); }
  /// For a device that comes later. Requires: an id above all others. May move the other values.
  T& add(DeviceId id, T value = {}) {
    T& added = entries_.emplace_back(Entry{id, std::move(value)}).value;
    if (id.number() + 1 == entries_.size()) in_place_ = entries_.size();
    return added;
  }

  /// @throws InvalidArgument for another device.
  [[nodiscard]] T& operator[](DeviceId id) { return entries_[place(id)].value; }
  [[nodiscard]] const T& operator[](DeviceId id) const { return entries_[place(id)].value; }
  /// Null for another device.
  [[nodiscard]] const T* find(DeviceId id) const {
    const std::size_t place = internal::place_of(entries_, id, &Entry::id);
    return place < entries_.size() ? &entries_[place].value : nullptr;
  }
  /// How many of the devices have lower ids. @throws InvalidArgument for another device.
  [[nodiscard]] std::size_t place(DeviceId id) const {
    if (id.number() < in_place_) return id.number();
    const std::size_t place = internal::place_of(entries_, id, &Entry::id);
    if (place == entries_.size()) internal::throw_no_device(id);
    return place;
  }

  /// The values alone, in order, for what knows devices by their places.
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> values;
    for (const Entry& entry : entries_) values.push_back(entry.value);
    return values;
  }
  [[nodiscard]] std::vector<DeviceId> ids() const {
    std::vector<DeviceId> ids;
    for (const Entry& entry : entries_) ids.push_back(entry.id);
    return ids;
  }
  [[nodiscard]] DeviceId id(std::size_t place) const { return entries_[place].id; }

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] auto begin() noexcept { return entries_.begin(); }
  [[nodiscard]] auto end() noexcept { return entries_.end(); }
  [[nodiscard]] auto begin() const noexcept { return entries_.begin(); }
  [[nodiscard]] auto end() const noexcept { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
  std::size_t in_place_ = 0;  // so many of the first ones are at the place of their number
};

}  // namespace paceline
