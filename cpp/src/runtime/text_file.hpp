// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace paceline::internal {

/// The content of a small text file; nothing if it cannot be read. Files of /proc and /sys report no size, so this
/// reads to the end.
[[nodiscard]] inline std::optional<std::string> read_text_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return std::nullopt;
  // Stream buffer iterators throw if a read fails, as for a thread that ended after the file was opened.
  std::string text;
  char piece[4096];
  while (stream.read(piece, sizeof piece) || stream.gcount() > 0) {
    text.append(piece, static_cast<std::size_t>(stream.gcount()));
  }
  if (stream.bad()) return std::nullopt;
  return text;
}

/// The number that is all of `text`.
template <class Integer = std::int64_t>
[[nodiscard]] std::optional<Integer> parse_integer(std::string_view text) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// A number in the name of a device: without sign and leading zeros.
[[nodiscard]] inline std::optional<std::int32_t> parse_index(std::string_view digits) {
  const bool canonical = digits == "0" || (!digits.empty() && digits.front() >= '1' && digits.front() <= '9');
  return canonical ? parse_integer<std::int32_t>(digits) : std::nullopt;
}

/// The non-empty pieces of `text` between separators.
[[nodiscard]] inline std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  while (!text.empty()) {
    const std::size_t end = text.find(separator);
    if (end != 0) pieces.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return pieces;
}

[[nodiscard]] inline std::string_view trim(std::string_view text) {
  constexpr std::string_view blank = " \t\r\n";
  const std::size_t first = text.find_first_not_of(blank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

}  // namespace paceline::internal
