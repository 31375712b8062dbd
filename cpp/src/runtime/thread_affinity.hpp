// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace paceline {

/// Lets the calling thread run on these cores only; on any if there are none. Best effort: a mask that the system
/// refuses (cores taken away since discovery) leaves the thread where it was.
void pin_this_thread(const std::vector<int>& cores) noexcept;

}  // namespace paceline
