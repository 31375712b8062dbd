// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/runtime/device_group.hpp>

namespace paceline {

class Task final : public GroupTask {
 public:
  explicit Task(std::function<void(DeviceId)> body) : body_(std::move(body)) {}
  void run(DeviceId device) noexcept override { body_(device); }

 private:
  std::function<void(DeviceId)> body_;
};

inline std::shared_ptr<Task> task(std::function<void(DeviceId)> body) {
  return std::make_shared<Task>(std::move(body));
}

inline DeviceGroup group_of(const std::vector<std::string>& names) { return DeviceGroup(names); }

/// Keeps the workers of a group until it is told to let go.
struct Held {
  explicit Held(DeviceGroup& group) {
    group.submit(source);
    while (entered < static_cast<int>(group.size())) std::this_thread::yield();
  }
  std::atomic<int> entered{0};
  std::atomic<bool> go{false};
  std::shared_ptr<Task> source = task([this](DeviceId) {
    ++entered;
    while (!go) std::this_thread::sleep_for(std::chrono::microseconds(100));
    --entered;
  });
};

/// Has no work, and is complete when it is cancelled.
class Idle final : public WorkSource {
 public:
  NextWork next(DeviceId, Clock::time_point) noexcept override {
    return cancelled ? NextWork::done() : NextWork::wait();
  }
  void perform(DeviceId, std::int64_t, Turn&) override {}
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override {}
  void failed(DeviceId, std::int64_t, std::exception_ptr) noexcept override {}
  void cancel(std::exception_ptr) noexcept override {
    cancelled = true;
    wake_all();
    wake_caller();
  }
  [[nodiscard]] bool complete() const noexcept override { return cancelled; }
  std::atomic<bool> cancelled{false};
};

}  // namespace paceline
