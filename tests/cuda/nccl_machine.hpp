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
  ASSERT_EQ(fake::problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(fake::driver_staged_copies(), 0) << "seed " << seed;
  ASSERT_EQ(nccl.problems(), std::vector<std::string>{}) << "seed " << seed;
  ASSERT_EQ(fake::leftovers(), fake::Leftovers{}) << "seed " << seed;
  ASSERT_EQ(nccl.communicators(), 0) << "seed " << seed;
}

}  // namespace paceline
