// SPDX-License-Identifier: Apache-2.0
#include "digits_data.hpp"

#include <charconv>
#include <fstream>
#include <stdexcept>
#include <string_view>

namespace {

// Removes "number" and the following comma from the front of `rest`. Returns -1 if there is no number from 0 to
// `highest`.
int take_number(std::string_view& rest, int highest) {
  int value = -1;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (error != std::errc{} || value < 0 || value > highest) return -1;
  rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
  if (!rest.empty() && rest.front() == ',') rest.remove_prefix(1);
  return value;
}

}  // namespace

Digits read_digits(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + " cannot be opened");
  Digits digits;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty() || line.front() == '#') continue;
    const std::string where = path + ", line " + std::to_string(number) + ": ";
    std::string_view rest = line;
    for (std::size_t i = 0; i < Digits::kPixels; ++i) {
      const int pixel = take_number(rest, 16);
      if (pixel < 0) throw std::runtime_error(where + "64 pixels from 0 to 16 are needed");
      digits.pixels.push_back(static_cast<float>(pixel) / 16.0F);
    }
    digits.labels.push_back(take_number(rest, 9));
    if (digits.labels.back() < 0) throw std::runtime_error(where + "there is no label from 0 to 9");
  }
  if (digits.size() == 0) throw std::runtime_error(path + " has no images");
  return digits;
}
