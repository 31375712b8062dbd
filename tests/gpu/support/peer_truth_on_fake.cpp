// SPDX-License-Identifier: Apache-2.0
//
// The same on a fake machine: two pairs of neighbours, one of which delivers zeros.
#include <cstdio>

#include "fake_cuda.hpp"
#include "peer_truth.hpp"
#include "twins.hpp"

int main() {
  fake::boot({.device_count = 4});
  fake::set_twins();
  fake::lie(3, 2);
  const bool right = paceline::gpu_test::print_peer_truth(std::size_t{1} << 20);
  for (const std::string& problem : fake::problems()) std::fprintf(stderr, "%s\n", problem.c_str());
  return right && fake::problems().empty() && fake::leftovers() == fake::Leftovers{} ? 0 : 1;
}
