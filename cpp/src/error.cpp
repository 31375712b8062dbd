// SPDX-License-Identifier: Apache-2.0
#include <paceline/error.hpp>

#include <utility>

namespace paceline {

Error::Error(const std::string& message, std::string device, std::source_location where)
    : std::runtime_error(message), device_(std::move(device)), where_(where) {}

// Out of line, so that each type has one home for its vtable and can be caught across library borders.
Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
Unavailable::~Unavailable() = default;
Timeout::~Timeout() = default;
Cancelled::~Cancelled() = default;
Rejected::~Rejected() = default;
Expired::~Expired() = default;
OutOfMemory::~OutOfMemory() = default;
DeviceLost::~DeviceLost() = default;

}  // namespace paceline
