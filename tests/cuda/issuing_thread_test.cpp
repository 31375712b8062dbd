// SPDX-License-Identifier: Apache-2.0
#include "runtime/issuing_thread.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "interrupts.hpp"

namespace paceline {
namespace {

using internal::IssuingThread;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// Jobs of which some are left by who has given them.
class IssuingThreadTest : public ::testing::Test {
 protected:
  IssuingThreadTest() { fake::boot({.device_count = 1}); }

  /// Gives the thread something to do that lasts until go_on(), and does not wait for it.
  void leave_it_busy(IssuingThread& thread, std::chrono::nanoseconds timeout = seconds(30)) {
    std::atomic<bool> begun{false};
    const Interrupting soon([&] { return begun.load(); });
    const auto job = [this, &begun] {
      begun = true;
      while (!goes_on) std::this_thread::sleep_for(milliseconds(1));
      first_done = true;
    };
    EXPECT_THROW(static_cast<void>(thread.run(job, timeout, IssuingThread::Interrupt::yes)), Interrupt);
    EXPECT_FALSE(first_done);
  }
  std::thread go_on_soon() {
    return std::thread([this] {
      std::this_thread::sleep_for(milliseconds(20));
      goes_on = true;
    });
  }

  std::atomic<bool> goes_on{false};
  std::atomic<bool> first_done{false};
  std::atomic<bool> second_done{false};
};

TEST_F(IssuingThreadTest, WaitsForEverWhereThatIsTheTimeout) {
  IssuingThread thread("pl test", {}, [] { return false; }, milliseconds(10));
  const auto job = [this] {
    std::this_thread::sleep_for(milliseconds(20));
    first_done = true;
  };
  EXPECT_TRUE(thread.run(job, std::chrono::nanoseconds::max()));
  EXPECT_TRUE(first_done);
  EXPECT_TRUE(thread.close(std::chrono::nanoseconds::max()));
}

TEST_F(IssuingThreadTest, FinishesWhatAnInterruptedCallHasLeftBeforeTheNextOne) {
  IssuingThread thread("pl test", {}, [] { return false; }, milliseconds(10));
  leave_it_busy(thread);
  std::thread other = go_on_soon();
  const bool back = thread.run(
      [this] {
        EXPECT_TRUE(first_done);
        std::this_thread::sleep_for(milliseconds(50));
        second_done = true;
      },
      seconds(30));
  EXPECT_TRUE(back);
  EXPECT_TRUE(second_done) << "the end of the first job was taken for that of the second";
  other.join();
  EXPECT_TRUE(thread.close(seconds(30)));
}

TEST_F(IssuingThreadTest, RunsWhatWasStartedAndDoesNotLookAfterItUnlessTold) {
  std::atomic<int> done{0};
  IssuingThread thread("pl test");
  for (int k = 0; k < 1000; ++k) {
    std::atomic<bool> begun{false};
    thread.start([&] {
      begun = true;
      ++done;  // the next job may be given before this one has ended
    });
    while (!begun) std::this_thread::yield();
  }
  EXPECT_TRUE(thread.wait(seconds(30)));
  EXPECT_EQ(done, 1000);
  EXPECT_TRUE(thread.close(seconds(30)));
}

TEST_F(IssuingThreadTest, IsGivenUpByWhoWaitsTooLongAndFreesWhatTheJobOwns) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = owned;
  auto thread = std::make_shared<IssuingThread>("pl test");
  thread->start([this, thread, owned = std::move(owned)] {  // it owns the thread, too
    while (!goes_on) std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT_FALSE(thread->wait(milliseconds(20)));
  EXPECT_FALSE(thread->wait(seconds(30))) << "it is not waited for again";
  EXPECT_FALSE(thread->close(seconds(30)));
  thread.reset();
  EXPECT_FALSE(seen.expired());
  goes_on = true;
  while (!seen.expired()) std::this_thread::sleep_for(milliseconds(1));
}

TEST_F(IssuingThreadTest, EndsWithAnOwnerWhoHasNotClosedIt) {
  const auto held = std::make_shared<int>(1);
  {
    IssuingThread thread("pl test", [held] { return held; });
    EXPECT_TRUE(thread.run([this] { first_done = true; }, seconds(30)));
  }
  while (held.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
}

TEST_F(IssuingThreadTest, RunsALastJobForWhoDoesNotComeBack) {
  {
    IssuingThread thread("pl test", {}, [] { return false; }, milliseconds(10));
    leave_it_busy(thread);
    thread.leave([this] { second_done = true; });
  }
  EXPECT_FALSE(second_done);
  goes_on = true;
  while (!second_done) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(first_done);
}

TEST_F(IssuingThreadTest, IsGivenUpIfWhatAnInterruptedCallHasLeftDoesNotEnd) {
  {
    IssuingThread thread("pl test", {}, [] { return false; }, milliseconds(10));
    leave_it_busy(thread, milliseconds(200));
    EXPECT_FALSE(thread.run([this] { second_done = true; }, seconds(30)));
    EXPECT_TRUE(thread.given_up());
  }
  goes_on = true;
  while (!first_done) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(second_done);
}

TEST_F(IssuingThreadTest, DropsWhatItIsGivenAfterItWasGivenUp) {
  IssuingThread thread("pl test");
  thread.start([this] {
    while (!goes_on) std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT_FALSE(thread.wait(milliseconds(20)));
  for (const bool has_ended : {false, true}) {
    if (has_ended) {
      goes_on = true;
      await_the_thread("pl test");
    }
    auto owned = std::make_shared<int>(1);
    const std::weak_ptr<int> seen = owned;
    thread.start([this, owned = std::move(owned)] { second_done = true; });
    EXPECT_TRUE(seen.expired());
  }
  EXPECT_FALSE(second_done);
}

TEST_F(IssuingThreadTest, LetsWhoIsInterruptedGoWhileAJobRuns) {
  IssuingThread thread("pl test");
  thread.start([this] {
    while (!goes_on) std::this_thread::sleep_for(milliseconds(1));
    first_done = true;
  });
  {
    const Interrupting soon;
    EXPECT_THROW(static_cast<void>(thread.wait(seconds(30), IssuingThread::Interrupt::yes)), Interrupt);
  }
  EXPECT_FALSE(thread.given_up());
  goes_on = true;
  EXPECT_TRUE(thread.wait(seconds(30), IssuingThread::Interrupt::yes));
  EXPECT_TRUE(first_done);
}

}  // namespace
}  // namespace paceline
