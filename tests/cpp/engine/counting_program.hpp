// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <paceline/engine/step.hpp>

namespace paceline {

/// Counts how often each item ran. Sleeps and throws as its seed says.
class CountingProgram final : public StepProgram {
 public:
  CountingProgram(std::int64_t batch, std::uint64_t seed, bool throws)
      : times_(static_cast<std::size_t>(batch)), seed_(seed), throws_(throws), sums_(8) {}

  bool run(const MicroBatch& mb) override {
    std::mt19937_64 rng(seed_ ^ static_cast<std::uint64_t>(mb.begin * 31 + 7));
    if (rng() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 60));
    if (throws_ && rng() % 5 == 0) throw std::runtime_error("thrown by the body");
    for (std::int64_t i = mb.begin; i < mb.end; ++i) times_[static_cast<std::size_t>(i)].fetch_add(1);
    sums_[mb.device.number()] += static_cast<double>(mb.size());
    return false;
  }

  void finish(DeviceId d) override { finished_[d.number()].fetch_add(1); }

  std::vector<ReductionSegment> reduction() override {
    ReductionSegment segment{.output = &total_, .count = 1, .dtype = DType::float64};
    for (const double& sum : sums_) segment.inputs.push_back(&sum);
    return {segment};
  }

  std::vector<std::atomic<int>> times_;
  std::uint64_t seed_;
  bool throws_;
  std::vector<double> sums_;
  std::array<std::atomic<int>, 8> finished_{};
  double total_ = -1.0;
};

}  // namespace paceline
