// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <string>

namespace paceline {

/// For messages: "1 item", "2 items", "0 items".
[[nodiscard]] inline std::string plural(std::integral auto count, const char* noun, const char* nouns = nullptr) {
  const bool one = count == 1;
  return std::to_string(count) + " " + (one ? noun : nouns != nullptr ? nouns : std::string(noun) + "s");
}

}  // namespace paceline
