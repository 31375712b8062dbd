// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>

#include "peer_truth.hpp"

int main() {
  try {
    return paceline::gpu_test::print_peer_truth(std::size_t{32} << 20) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_peer_truth: %s\n", error.what());
    return 1;
  }
}
