// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/plan/schedule.hpp>
#include <paceline/runtime/async_device.hpp>

#include "engine/hang.hpp"

namespace paceline::internal {

/// The moments of one action: its beginning, the end of each of its parts, and its end. On a GPU these are events on
/// its stream, else times of the host. Its worker writes them.
class ActionMarks {
 public:
  void clear() noexcept {
    used_ = 0;
    times_.clear();
  }
  /// `maker` and `stream` are null for a host device.
  void mark(AsyncDevice* maker, Stream* stream) {
    if (stream == nullptr) {
      times_.push_back(std::chrono::steady_clock::now());
      return;
    }
    if (events_.size() == used_) events_.push_back(maker->make_event(true));
    stream->record(*events_[used_++]);
  }
  /// The end of the action on its stream; null on a host device, where it has ended when the call has returned.
  [[nodiscard]] const Event* end() const noexcept { return used_ == 0 ? nullptr : events_[used_ - 1].get(); }
  [[nodiscard]] const Event* begin() const noexcept { return used_ == 0 ? nullptr : events_[0].get(); }
  [[nodiscard]] std::size_t count() const noexcept { return used_ + times_.size(); }
  /// From one mark to a later one. Requires: the events are done.
  [[nodiscard]] double seconds(std::size_t from, std::size_t to) const {
    if (used_ > 0) return events_[to]->seconds_since(*events_[from]);
    return std::chrono::duration<double>(times_[to] - times_[from]).count();
  }
  [[nodiscard]] double seconds() const { return count() < 2 ? 0.0 : seconds(0, count() - 1); }

 private:
  std::vector<std::unique_ptr<Event>> events_;  // kept from step to step
  std::size_t used_ = 0;
  std::vector<std::chrono::steady_clock::time_point> times_;
};

/// The marks of all actions of a step, the events behind everything that it has enqueued, and its loss.
struct StepMarks {
  StepMarks(std::size_t stages, std::int64_t micro_batches) : actions(stages), over(stages) {
    for (auto& stage : actions) {
      for (auto& kind : stage) kind = std::vector<ActionMarks>(static_cast<std::size_t>(micro_batches));
    }
  }

  [[nodiscard]] ActionMarks& at(std::size_t stage, plan::Action::Kind kind, std::int64_t micro_batch) {
    return actions[stage][kind == plan::Action::Kind::forward ? 0 : 1][static_cast<std::size_t>(micro_batch)];
  }
  [[nodiscard]] bool done() const {
    for (const auto& event : over) {
      if (event != nullptr && !event->done()) return false;
    }
    return true;
  }
  void wait(std::chrono::nanoseconds timeout, const Hang& hung) const {
    for (const auto& event : over) {
      if (event != nullptr) hung.await(*event, timeout);
    }
  }

  std::vector<std::array<std::vector<ActionMarks>, 2>> actions;
  std::vector<std::unique_ptr<Event>> over;  // of each stage; null on the host
  std::unique_ptr<Buffer> loss;              // pinned, where the last stage's GPU writes its loss; null on the host
};

}  // namespace paceline::internal
