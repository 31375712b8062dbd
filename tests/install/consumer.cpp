// SPDX-License-Identifier: Apache-2.0
// Plans a batch and runs a task on two devices through the installed library: its headers, its targets and what it
// exports are enough.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/split.hpp>
#include <paceline/runtime/device_group.hpp>

namespace {

class CountWorkers : public paceline::GroupTask {
 public:
  void run(std::size_t) noexcept override { ++runs; }
  [[nodiscard]] bool complete() const noexcept override { return runs == 2; }

  std::atomic<int> runs{0};
};

int failures = 0;

void expect(bool holds, const char* what) {
  std::printf("%s: %s\n", holds ? "ok" : "FAILED", what);
  if (!holds) ++failures;
}

}  // namespace

int main() {
  // The second device is half as fast: it gets a third.
  const std::vector<paceline::plan::CostModel> models{paceline::plan::CostModel::affine(0.0, 1e-3),
                                                      paceline::plan::CostModel::affine(0.0, 2e-3)};
  const paceline::plan::Split split = paceline::plan::split_batch(96, models);
  expect(split.shares == std::vector<std::int64_t>{64, 32}, "split_batch gives each device what it can finish");

  const std::vector<std::string> names{"host:0", "host:1"};
  paceline::DeviceGroup group{names};
  const auto task = std::make_shared<CountWorkers>();
  expect(group.run(task), "a group runs a task to its end");
  expect(task->runs == 2, "each of two devices runs it once");
  group.close();
  expect(group.closed(), "a group closes");

  // Its type must be the same on both sides of the library's border.
  bool caught = false;
  try {
    (void)paceline::plan::split_even(-1, 2);
  } catch (const paceline::InvalidArgument&) {
    caught = true;
  }
  expect(caught, "an exception of the library is caught by its type");
  return failures == 0 ? 0 : 1;
}
