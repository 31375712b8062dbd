// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paceline::balance {

/// Raised when an older reader would misread a newer ledger, or the same calls would lead to other decisions.
constexpr std::int64_t kLedgerVersion = 5;

}  // namespace paceline::balance
