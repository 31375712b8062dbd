// SPDX-License-Identifier: Apache-2.0
#include "engine/unsettled.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include <paceline/error.hpp>

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
  EXPECT_THROW(settle(2), DeviceLost);
  EXPECT_EQ(settle(0), std::vector<int>{});
}

TEST_F(UnsettledSteps, StayWhereTheWaitIsInterrupted) {
  Work& first = add(1);
  add(2);
  first.interrupted = true;
  EXPECT_THROW(settle(0), std::runtime_error);
  first.interrupted = false;
  EXPECT_EQ(settle(0), (std::vector{1, 2}));
}

}  // namespace
}  // namespace paceline::internal
