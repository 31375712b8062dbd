// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace paceline::gpu_test {

/// Copies between each two GPUs, both ways, pulled and pushed, in memory of cudaMalloc and of our pools; then all GPUs
/// at once, in a ring; then through the host. Every byte is compared. Prints one JSON object. False if a byte is wrong.
bool print_peer_truth(std::size_t bytes);

}  // namespace paceline::gpu_test
