// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <memory>

#include <paceline/balance/ledger.hpp>

namespace paceline::python {

/// A ledger in a file, which takes the place of an existing one.
/// @throws InvalidArgument if the file cannot be opened or written to. `call` begins the message.
std::shared_ptr<balance::LedgerWriter> open_ledger(const char* call, const std::filesystem::path& path);

}  // namespace paceline::python
