// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/error.hpp>

#include "errors.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

class Never final : public Event {
 public:
  [[nodiscard]] bool done() const override { return false; }
  [[nodiscard]] double seconds_since(const Event&) const override { return 0.0; }
  [[nodiscard]] std::string device() const override { return "fake:0"; }
};

/// Its first device waits for what never comes.
class Late : public StepProgram {
 public:
  bool run(const MicroBatch&) override { return false; }
  [[nodiscard]] const Event* slot(DeviceId device) override { return device == 0 ? &never_ : nullptr; }
  [[nodiscard]] std::chrono::nanoseconds patience() const override { return std::chrono::milliseconds(1); }

 private:
  Never never_;
};

/// Runs the step, but not for ever.
void run(const std::shared_ptr<StepProgram>& program) {
  int looks = 0;
  run_step(host_group(2), program, {.shares = {1, 1}, .stealing = false}, [&] { return ++looks < 100; });
}

TEST(StepPatience, EndsAStepWhoseProgramDoesNotSayWhatThen) {
  const auto error = thrown_by<Timeout>([&] { run(std::make_shared<Late>()); });
  EXPECT_EQ(error.device(), "fake:0");
  EXPECT_TRUE(says(error, "what was enqueued has not ended"));
}

TEST(StepPatience, EndsAStepWithWhatItsProgramSays) {
  class Saying final : public Late {
    void give_up(const Event&) override { throw DeviceLost("it is gone"); }
  };
  EXPECT_THROW(run(std::make_shared<Saying>()), DeviceLost);
}

}  // namespace
}  // namespace paceline
