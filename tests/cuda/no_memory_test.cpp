// SPDX-License-Identifier: Apache-2.0
//
// The end of a step on GPUs on a thread that gets no memory.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>

#include "orders.hpp"
#include "queued_steps.hpp"
#include "shortage.hpp"

namespace paceline {
namespace {

void run_nothing(DeviceQueues& queues) {
  queues.enter(0);
  queues.deliver(0, {});
  queues.reduce();
  queues.end_step();
}

TEST(StepTimes, EndWhereTheListsOfTheirEventsGetNoMemory) {
  boot(1, 1);
  {
    DeviceQueues queues(group_of({"cuda:0"}), {});
    std::shared_ptr<const StepTimes> times = queues.begin_step({});
    run_nothing(queues);
    times->wait();
    const std::shared_ptr<const StepTimes> later = queues.begin_step({});  // the queues let go of those before
    ASSERT_EQ(times.use_count(), 1);
    {
      const Shortage shortage;
      times.reset();  // a destructor that throws would end the program
    }
    run_nothing(queues);
    later->wait();
    queues.drain();
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

}  // namespace
}  // namespace paceline
