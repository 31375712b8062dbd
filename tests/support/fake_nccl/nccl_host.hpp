// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fake_nccl.hpp"

namespace fake {

/// The fake NCCL, as if just loaded, on the machine that was booted last. The first call makes it the NCCL of the
/// process, for good: before paceline looks for one.
Nccl& boot_nccl();
/// As it is. Requires: boot_nccl() before.
Nccl& the_nccl();

}  // namespace fake
