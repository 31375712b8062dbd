// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace paceline::internal {

/// Throws what a worker has thrown, for the caller: an error of the same type (of Error, for types that are not of this
/// library) whose text is message(text of the error), with the error itself nested in it. Cancelled is thrown as it is.
///
/// An error may name another device, which this one waited for. Unless `always`, such an error keeps its own text.
[[noreturn]] void rethrow(const std::exception_ptr& error, const char* call, const std::string& device, bool always,
                          const std::function<std::string(const std::string&)>& message);

}  // namespace paceline::internal
