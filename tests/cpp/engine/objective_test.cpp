// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include <paceline/error.hpp>

#include "engine/objective_state.hpp"

namespace paceline {
namespace {

using State = Objective::State;

TEST(Objective, WhoReadsItDoesNotHoldUpTheStepThatFailsIt) {
  std::promise<void> reading;
  std::promise<void> failed;
  bool in_time = false;
  State state([&] {
    reading.set_value();
    // For as long as the device works. The limit is for the case that fail() waits for this reader.
    in_time = failed.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    return 1.0;
  });
  std::jthread reader([&] { EXPECT_THROW(state.get(), DeviceLost) << "the first outcome counts"; });
  reading.get_future().wait();
  state.fail(std::make_exception_ptr(DeviceLost("gone")));
  failed.set_value();
  reader.join();
  EXPECT_TRUE(in_time) << "fail() waited for the reader";
  EXPECT_THROW(state.get(), DeviceLost);
}

TEST(Objective, IsReadOnceAndByTheNextReaderIfTheFirstWasInterrupted) {
  int reads = 0;
  State state([&] {
    if (++reads == 1) throw std::runtime_error("interrupted");
    return 2.0;
  });
  EXPECT_THROW(state.get(), std::runtime_error);
  EXPECT_EQ(state.get(), 2.0);
  state.fail(std::make_exception_ptr(DeviceLost("later")));
  EXPECT_EQ(state.get(), 2.0);
  EXPECT_EQ(reads, 2);
}

}  // namespace
}  // namespace paceline
