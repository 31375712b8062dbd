// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include <paceline/error.hpp>

#include "engine/objective_state.hpp"
#include "engine/unsettled.hpp"

namespace paceline::internal {
namespace {

struct Work {
  int number = 0;
  bool done = false;
  bool lost = false;
  bool interrupted = false;
  [[nodiscard]] bool settled() const {
    if (lost) throw DeviceLost("it is lost");
    return done;
  }
  void settle() const {
    if (interrupted) throw std::runtime_error("Ctrl-C");
    if (lost) throw DeviceLost("it is lost");
  }
};

class UnsettledSteps : public testing::Test {
 protected:
  Work& add(int number) {
    all_.push_back(std::make_shared<Work>(Work{.number = number}));
    steps_.add(all_.back());
    return *all_.back();
  }
  std::vector<int> settle(std::size_t most) {
    std::vector<int> noted;
    steps_.settle(most, [&](const Work& work) { noted.push_back(work.number); });
    return noted;
  }

  std::vector<std::shared_ptr<Work>> all_;
  Unsettled<std::shared_ptr<Work>> steps_;
};

TEST_F(UnsettledSteps, AreNotedInOrderAsFarAsTheyAreDoneOrTooMany) {
  add(1).done = true;
  add(2);
  add(3).done = true;
  EXPECT_EQ(settle(2), std::vector{1}) << "the third comes after the second, which still runs";
  EXPECT_EQ(settle(1), (std::vector{2, 3})) << "it waits for the second, and the third is done";
  add(4);
  EXPECT_EQ(settle(1), std::vector<int>{});
  EXPECT_EQ(settle(0), std::vector{4});
}

TEST_F(UnsettledSteps, ReportALostDeviceOnce) {
  add(1).lost = true;
  add(2).lost = true;
  EXPECT_EQ(steps_.count([] { return 3; }), 5);
  EXPECT_THROW(settle(2), DeviceLost);
  EXPECT_EQ(settle(0), std::vector<int>{});
  EXPECT_EQ(steps_.count([] { return 3; }), 3) << "what was dropped does not count";
}

TEST_F(UnsettledSteps, StayWhereTheWaitIsInterrupted) {
  Work& first = add(1);
  add(2);
  first.interrupted = true;
  EXPECT_THROW(settle(0), std::runtime_error);
  first.interrupted = false;
  EXPECT_EQ(settle(0), (std::vector{1, 2}));
}

TEST_F(UnsettledSteps, AreDroppedIfTheirTimesCannotBeRead) {
  add(1).done = true;
  add(2).done = true;
  const auto look = [this] { steps_.look([](const Work&) { throw DeviceLost("reading a time failed"); }); };
  std::jthread([&] { EXPECT_THROW(look(), DeviceLost); }).join();
  std::jthread([&] { EXPECT_NO_THROW(look()); }).join();
  EXPECT_THROW(settle(2), DeviceLost);
  EXPECT_EQ(settle(0), std::vector<int>{});
}

/// A step whose first wait takes until it may go on, as the wait of a thread that reads figures may.
struct LateWork {
  int number = 0;
  bool first_waits = false;
  std::atomic<bool> done{false};
  std::atomic<int> waits{0};
  std::latch inside{1};
  std::latch go_on{1};
  [[nodiscard]] bool settled() const { return done; }
  void settle() {
    if (waits++ == 0 && first_waits) {
      inside.count_down();
      go_on.wait();
      return;
    }
    done.wait(false);
  }
};

TEST(UnsettledStepsOfTwoThreads, AreNotTakenForOnesThatAnotherThreadHasNotedMeanwhile) {
  std::vector<int> noted;
  const auto note = [&](const LateWork& work) { noted.push_back(work.number); };
  Unsettled<std::shared_ptr<LateWork>> steps;
  const auto first = std::make_shared<LateWork>(1, true);
  const auto second = std::make_shared<LateWork>(2);
  steps.add(first);
  std::jthread reader([&] { steps.look(note); });
  first->inside.wait();
  first->done = true;
  steps.settle(0, note);  // overtakes the reader
  EXPECT_EQ(noted, std::vector{1});
  steps.add(second);
  first->go_on.count_down();
  while (second->waits == 0) std::this_thread::yield();  // the reader waits for it, and has not noted it
  EXPECT_EQ(noted, std::vector{1});
  second->done = true;
  second->done.notify_all();
  reader.join();
  EXPECT_EQ(noted, (std::vector{1, 2}));
}

TEST(UnsettledStepsOfTwoThreads, AreNotedOnceAndInOrderWhileAnotherThreadLooks) {
  constexpr int kSteps = 2000;
  std::vector<int> noted;  // without a lock: one thread notes at a time
  const auto note = [&](const LateWork& work) { noted.push_back(work.number); };
  Unsettled<std::shared_ptr<LateWork>> steps;
  std::atomic<bool> over{false};
  std::jthread reader([&] {
    while (!over) steps.look(note);
  });
  std::shared_ptr<LateWork> before;
  for (int number = 0; number < kSteps; ++number) {
    const auto work = std::make_shared<LateWork>(number);
    steps.add(work);
    if (before != nullptr) {  // the devices are a step behind
      before->done = true;
      before->done.notify_all();
    }
    before = work;
    steps.settle(1, note);
  }
  before->done = true;
  before->done.notify_all();
  over = true;
  reader.join();
  steps.settle(0, note);
  ASSERT_EQ(noted.size(), static_cast<std::size_t>(kSteps));
  for (int number = 0; number < kSteps; ++number) EXPECT_EQ(noted[static_cast<std::size_t>(number)], number);
}

TEST_F(UnsettledSteps, TellTheThreadThatStepsOfAFailureThatAnotherOneHasRead) {
  Work& lost = add(1);
  add(2);
  lost.lost = true;
  const auto look = [this] { steps_.look([](const Work&) {}); };
  std::jthread([&] { EXPECT_THROW(look(), DeviceLost); }).join();
  std::jthread([&] { EXPECT_NO_THROW(look()) << "a second reader"; }).join();
  EXPECT_NO_THROW(look()) << "as retire(), with which the caller answers the failure";
  EXPECT_THROW(settle(2), DeviceLost);
  EXPECT_EQ(settle(0), std::vector<int>{});
  add(3).lost = true;
  EXPECT_THROW(look(), DeviceLost) << "on the thread that steps: once";
  EXPECT_EQ(settle(0), std::vector<int>{});
}

TEST(UnsettledStepsOfTwoThreads, DoNotThrowAFailureAgainThatTheThreadThatStepsHasThrownMeanwhile) {
  struct LostWork {
    std::latch inside{1};
    std::latch go_on{1};
    std::atomic<int> waits{0};
    bool lost = true;
    [[nodiscard]] bool settled() const { return true; }
    void settle() {
      if (!lost) return;
      if (waits++ == 0) {
        inside.count_down();
        go_on.wait();
      }
      throw DeviceLost("it is lost");
    }
  };
  int noted = 0;
  const auto note = [&](const LostWork&) { ++noted; };
  Unsettled<std::shared_ptr<LostWork>> steps;
  const auto lost = std::make_shared<LostWork>();
  const auto next = std::make_shared<LostWork>();
  next->lost = false;
  steps.add(lost);
  std::jthread reader([&] { EXPECT_THROW(steps.look(note), DeviceLost); });
  lost->inside.wait();
  EXPECT_THROW(steps.settle(0, note), DeviceLost);
  steps.add(next);  // the caller has gone on without the device
  lost->go_on.count_down();
  reader.join();
  EXPECT_NO_THROW(steps.settle(0, note));
  EXPECT_EQ(noted, 1);
}

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
}  // namespace paceline::internal
