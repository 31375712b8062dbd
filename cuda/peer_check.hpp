// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pool.hpp"

namespace paceline::cuda {

/// Whether what GPUs copy from each other's memory arrives: a pattern goes both ways, by a stream of each GPU, twice,
/// and every byte is compared. Requires that the two GPUs access each other's memory and pools. Waits for the copies,
/// which takes about a millisecond. Any thread.
///
/// Some machines grant access and deliver zeros or old bytes: an IOMMU or PCIe ACS that redirects what GPUs send each
/// other, or a driver that was patched to grant it. CUDA reports no error then.
///
/// @throws Error if the copies could not be made (no memory, a lost GPU), which says nothing of the path.
[[nodiscard]] bool copies_arrive(int one, Pool& pool_of_one, int other, Pool& pool_of_other);

}  // namespace paceline::cuda
