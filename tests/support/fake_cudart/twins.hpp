// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fake {

/// Gives every kernel of paceline its host twin: the function that runs in its place here, and what a GPU's result is
/// compared with there; and tells the fake how to get back what paceline keeps.
void set_twins();

}  // namespace fake
