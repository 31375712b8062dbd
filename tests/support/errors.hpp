// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include <paceline/error.hpp>

namespace paceline {

/// Whether `part` is in `text`.
inline ::testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << part << "\" is not in \"" << text << '"';
}

inline ::testing::AssertionResult says(const Error& error, const std::string& part) {
  return says(std::string(error.what()), part);
}

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

/// The error of this type that a call throws.
template <class E>
E thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return E("nothing");
}

}  // namespace paceline
