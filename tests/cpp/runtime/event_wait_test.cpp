// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include <paceline/runtime/async_device.hpp>

namespace paceline {
namespace {

/// Done after so many queries.
class Looked final : public Event {
 public:
  explicit Looked(int looks) : left_(looks) {}
  [[nodiscard]] bool done() const override { return --left_ < 0; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "fake:0"; }

 private:
  mutable int left_;
};

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

long switches() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw + usage.ru_nivcsw;
}

TEST(WaitForAnEvent, KeepsItsCoreWhileTheEventIsDueAtOnce) {
  const int core = sched_getcpu();
  std::atomic<bool> over{false};
  std::jthread busy([&] {
    pin_to(core);
    while (!over) {
    }
  });
  long fewest = std::numeric_limits<long>::max();
  std::jthread waiting([&] {
    pin_to(core);
    // The system may take the core away in one round, but hardly in all.
    for (int round = 0; round < 10; ++round) {
      const long before = switches();
      wait_for(Looked(20));
      fewest = std::min(fewest, switches() - before);
    }
    over = true;
  });
  waiting.join();
  EXPECT_LE(fewest, 2) << "each switch gives the core to the busy program for a slice of its time";
}

}  // namespace
}  // namespace paceline
