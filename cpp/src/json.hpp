// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <string_view>

namespace paceline {

/// `text` as a JSON string, quotes included.
inline std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// Reads back bit for bit. JSON has no infinity and no NaN: null.
inline std::string json_number(double value) { return std::isfinite(value) ? fmt::to_string(value) : "null"; }

}  // namespace paceline
