// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fake_cuda.hpp"
#include "gpu_arrays.hpp"
#include "helpers.hpp"
#include "nccl_host.hpp"
#include "twins.hpp"

namespace paceline {

/// A machine as after boot, with an NCCL that was just loaded.
inline fake::Nccl& boot(std::uint64_t seed, int gpus) {
  fake::boot({.seed = seed, .device_count = gpus});
  fake::set_twins();
  set_user_twins();
  return fake::boot_nccl();
}

inline void expect_clean(const fake::Nccl& nccl, std::uint64_t seed) {
  ASSERT_NO_FATAL_FAILURE(expect_clean(seed));
  ASSERT_EQ(nccl.problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(nccl.communicators(), 0) << "seed " << seed;
}

/// The same with a machine that has GPUs and a fake NCCL.
template <class Body>
void for_each_order(std::uint64_t count, int gpus, const Body& body) {
  for (std::uint64_t seed = 0; seed < count && !::testing::Test::HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    fake::Nccl& nccl = boot(seed, gpus);
    body(nccl, seed);
    expect_clean(nccl, seed);
  }
}

}  // namespace paceline
