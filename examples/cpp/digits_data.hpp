// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

/// Images of handwritten digits with their labels, in the order of the file.
struct Digits {
  static constexpr std::size_t kPixels = 64;

  std::vector<float> pixels;  ///< kPixels per image, from 0 to 1
  std::vector<int> labels;    ///< 0 to 9

  [[nodiscard]] std::size_t size() const noexcept { return labels.size(); }
  [[nodiscard]] const float* image(std::size_t index) const { return pixels.data() + index * kPixels; }
};

/// Reads 64 pixels (0 to 16) and a label per line; lines that begin with # are comments.
/// @throws std::runtime_error that names the file and the line.
Digits read_digits(const std::string& path);
