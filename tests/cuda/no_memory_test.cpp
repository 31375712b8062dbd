// SPDX-License-Identifier: Apache-2.0
//
// The end of a step on GPUs on a thread that gets no memory. The operator new of this program fails on a thread that
// asks for it.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>

#include "orders.hpp"
#include "queued_steps.hpp"

namespace {

thread_local bool no_memory = false;

}  // namespace

// Not inlined: GCC would take the freed memory for that of another allocation function.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const data = no_memory ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }

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
    no_memory = true;
    times.reset();  // a destructor that throws would end the program
    no_memory = false;
    run_nothing(queues);
    later->wait();
    queues.drain();
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

}  // namespace
}  // namespace paceline
