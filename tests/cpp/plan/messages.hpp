// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <paceline/error.hpp>

namespace paceline::plan::testing {

/// What the error of a call says; "" if it throws none.
template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace paceline::plan::testing
