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

#include <paceline/engine/step_loop.hpp>

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

TEST(StepTimes, EndWhereTheListsOfTheirEventsGetNoMemory) {
  bring_seconds = 100.0;  // so that there are waits, whose events are moved to the list of all
  boot(1, 2);
  {
    const DeviceGroup group = group_of({"cuda:0", "cuda:1"});
    StepLoop step_loop(group, {.balance = Balance::even, .micro_batch = 3});
    auto program = std::make_shared<Summing>(group);
    const std::unique_ptr<Buffer> output = program->queues.maker(0).allocate_pinned(sizeof(double));
    program->begin(1.0, static_cast<double*>(output->data()));
    std::shared_ptr<Step> step = step_loop.begin(step_loop.plan(kBatch), program);
    step->wait();
    EXPECT_EQ(step->failure(), nullptr);
    program->queues.drain();
    step.reset();
    EXPECT_EQ(program.use_count(), 1);
    no_memory = true;
    program.reset();  // its queues hold the times of the last step; a destructor that throws would end the program
    no_memory = false;
  }
  bring_seconds = 0.0;
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
}

}  // namespace
}  // namespace paceline
