// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <utility>

#include <paceline/error.hpp>

namespace paceline {

/// @throws InvalidArgument with this message.
template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> message, Args&&... args) {
  throw InvalidArgument(fmt::format(message, std::forward<Args>(args)...));
}

/// The same unless `fine`. The arguments are evaluated in any case.
template <class... Args>
void require(bool fine, fmt::format_string<Args...> message, Args&&... args) {
  if (!fine) refuse(message, std::forward<Args>(args)...);
}

}  // namespace paceline
