// SPDX-License-Identifier: Apache-2.0
#include "engine/rethrow.hpp"

#include <fmt/format.h>

#include <new>

#include <paceline/error.hpp>

namespace paceline::internal {
namespace {

/// Throws an error of the type of the exception that is being handled, and nests that in it.
[[noreturn]] void throw_of_this_type(const std::string& message, const std::string& device) {
  try {
    throw;
  } catch (const InvalidArgument&) {
    std::throw_with_nested(InvalidArgument(message, device));
  } catch (const Unavailable&) {
    std::throw_with_nested(Unavailable(message, device));
  } catch (const Timeout&) {
    std::throw_with_nested(Timeout(message, device));
  } catch (const OutOfMemory&) {
    std::throw_with_nested(OutOfMemory(message, device));
  } catch (const std::bad_alloc&) {
    std::throw_with_nested(OutOfMemory(message, device));
  } catch (const DeviceLost&) {
    std::throw_with_nested(DeviceLost(message, device));
  } catch (...) {
    std::throw_with_nested(Error(message, device));
  }
}

}  // namespace

void rethrow(const std::exception_ptr& error, const char* call, const std::string& device, bool always,
             const std::function<std::string(const std::string&)>& message) {
  try {
    std::rethrow_exception(error);
  } catch (const Cancelled&) {
    throw;
  } catch (const Error& found) {
    const bool others = !always && !found.device().empty();
    throw_of_this_type(
        others ? fmt::format("{}: {}. Nothing was committed.", call, found.what()) : message(found.what()),
        found.device().empty() ? device : found.device());
  } catch (const std::exception& found) {
    throw_of_this_type(message(found.what()), device);
  } catch (...) {
    throw_of_this_type(message("an exception that is no std::exception"), device);
  }
}

}  // namespace paceline::internal
