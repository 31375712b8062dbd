// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fake {

/// Gives every kernel of paceline a host twin. The twin runs in the kernel's place on the fake, and on a GPU its result
/// is the reference. Also tells the fake how to free what paceline caches.
void set_twins();

}  // namespace fake
