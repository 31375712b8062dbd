// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fake_nccl.hpp"

namespace fake {

/// Resets the fake NCCL for the machine that was booted last. The first call makes it the NCCL of this process for
/// good, so call it before paceline looks for NCCL.
Nccl& boot_nccl();
/// Returns the fake NCCL without a reset. Requires: boot_nccl() before.
Nccl& the_nccl();

}  // namespace fake
