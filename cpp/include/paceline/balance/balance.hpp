// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <paceline/export.hpp>

namespace paceline {

/// How work is shared out.
enum class Balance : std::uint8_t {
  automatic,  ///< "auto": by measured speeds; devices that are done early take over work of others
  even,       ///< "even": the same for each device
  weighted,   ///< "weighted": by given ratios
};

/// As Python, ledgers and explain() write it.
[[nodiscard]] PACELINE_API std::string name_of(Balance balance);
/// @throws InvalidArgument for a name of none.
[[nodiscard]] PACELINE_API Balance balance_named(std::string_view name);

}  // namespace paceline
