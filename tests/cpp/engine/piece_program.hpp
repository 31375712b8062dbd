// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>

namespace paceline::piece_tests {

inline constexpr std::int64_t kFixed = 2500;  // bytes of a micro-batch
inline constexpr std::int64_t kPerItem = 1000;

/// Notes what runs, and takes memory: `fits` is how many items there is room for.
class PieceProgram final : public StepProgram {
 public:
  explicit PieceProgram(std::size_t devices, std::int64_t fits = 1 << 20) : fits_(fits), ran(devices) {}

  bool run(const MicroBatch& mb) override {
    if (mb.size() > fits_) throw OutOfMemory("as planned");
    if (seconds_per_item) {
      const double busy = static_cast<double>(mb.size()) * seconds_per_item(mb.size());
      std::this_thread::sleep_for(std::chrono::duration<double>(busy));
    }
    ran[mb.device.number()].push_back(mb);
    for (const std::int64_t item : mb.items) {
      const std::lock_guard lock(mutex_);
      ++items[item];
    }
    return false;
  }
  std::optional<std::int64_t> memory_bytes(DeviceId device) override {
    if (nothing_to_do) return std::nullopt;
    return kFixed + kPerItem * ran[device.number()].back().size();
  }

  [[nodiscard]] std::vector<std::int64_t> sizes(std::size_t device) const {
    std::vector<std::int64_t> sizes;
    for (const MicroBatch& mb : ran[device]) sizes.push_back(mb.size());
    return sizes;
  }

 private:
  std::int64_t fits_;
  std::mutex mutex_;

 public:
  double (*seconds_per_item)(std::int64_t items) = nullptr;
  bool nothing_to_do = false;
  std::vector<std::vector<MicroBatch>> ran;
  std::map<std::int64_t, int> items;
};

template <class Batch>
void run(StepLoop& step_loop, const Batch& batch, const std::shared_ptr<PieceProgram>& program,
         const BatchKind& kind = {}) {
  for (;;) {
    std::shared_ptr<const BatchPlan> plan;
    if constexpr (std::is_same_v<Batch, int>) {
      plan = step_loop.plan(batch, kind);
    } else {
      plan = step_loop.plan(batch);
    }
    for (auto& list : program->ran) list.clear();
    const auto step = step_loop.begin(plan, program);
    step->wait();
    if (step->failure() != nullptr && step_loop.shrink(*step)) continue;
    step->rethrow_failure();
    step_loop.commit(step);
    return;
  }
}

inline std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

}  // namespace paceline::piece_tests
