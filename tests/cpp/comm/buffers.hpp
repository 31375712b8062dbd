// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/device_group.hpp>

#include "reference.hpp"

namespace paceline {

inline DeviceGroup make_group(std::size_t size) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < size; ++i) names.push_back("host:" + std::to_string(i));
  return DeviceGroup(std::span<const std::string>(names));
}

// Memory for one buffer per device, at an unaligned address.
class Buffers {
 public:
  Buffers(std::size_t device_count, std::size_t count, DType dtype, std::uint64_t seed)
      : count_(count), dtype_(dtype), memory_(device_count, std::vector<char>(count * size_of(dtype) + 1)) {
    std::mt19937_64 random(seed);
    for (std::size_t d = 0; d < device_count; ++d) reference::fill(view(d).data, count, dtype, random);
  }
  [[nodiscard]] BufferView view(std::size_t device) { return {memory_[device].data() + 1, count_, dtype_}; }
  [[nodiscard]] std::vector<BufferView> views() {
    std::vector<BufferView> all;
    for (std::size_t d = 0; d < memory_.size(); ++d) all.push_back(view(d));
    return all;
  }
  [[nodiscard]] std::vector<const void*> pointers() {
    std::vector<const void*> all;
    for (std::size_t d = 0; d < memory_.size(); ++d) all.push_back(view(d).data);
    return all;
  }
  friend bool operator==(const Buffers& a, const Buffers& b) { return a.memory_ == b.memory_; }

 private:
  std::size_t count_;
  DType dtype_;
  std::vector<std::vector<char>> memory_;
};

}  // namespace paceline
