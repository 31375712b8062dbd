// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

namespace paceline {

/// Pins the calling thread to these cores; an empty list means no change. Best effort: if the system refuses the mask,
/// because cores were taken away since discovery, the thread stays where it was.
void pin_this_thread(const std::vector<int>& cores) noexcept;

}  // namespace paceline
