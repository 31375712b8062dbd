// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/blocking.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>

namespace paceline {
namespace {

struct Interrupt {};

int entered = 0;
int left = 0;
int polls = 0;
int polls_until_interrupt = 0;

void* enter() { return &++entered; }
void leave(void*) { ++left; }
void poll(void*) {
  if (++polls == polls_until_interrupt) throw Interrupt();
}

class Never final : public Event {
 public:
  [[nodiscard]] bool done() const override { return false; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "cuda:7"; }
};

class BlockingHooksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    entered = left = polls = polls_until_interrupt = 0;
    set_blocking_hooks({.enter = enter, .leave = leave, .poll = poll});
  }
  void TearDown() override { set_blocking_hooks({}); }
};

TEST_F(BlockingHooksTest, BracketAWaitAndAreAskedNowAndThen) {
  EXPECT_THROW(wait_for(Never(), std::chrono::seconds(1)), Timeout);
  EXPECT_EQ(entered, 1);
  EXPECT_EQ(left, 1);
  EXPECT_GE(polls, 1);
  EXPECT_LE(polls, 20) << "every 50 ms at most";
}

TEST_F(BlockingHooksTest, WhatAPollThrowsEndsTheWait) {
  polls_until_interrupt = 2;
  EXPECT_THROW(wait_for(Never(), std::chrono::hours(1)), Interrupt);
  EXPECT_EQ(entered, 1);
  EXPECT_EQ(left, 0) << "the hook that threw has taken its token back";
}

TEST_F(BlockingHooksTest, AreAskedForTheOuterWaitWhereTheInnerOneHasLetGoOfNothing) {
  polls_until_interrupt = 1;
  const BlockingRegion outer;
  set_blocking_hooks({.enter = []() -> void* { return nullptr; }, .leave = leave, .poll = poll});
  EXPECT_THROW(wait_for(Never(), std::chrono::seconds(30)), Interrupt);
  EXPECT_EQ(left, 0);
}

}  // namespace
}  // namespace paceline
