// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

/// Asks a pool for one device. For a device that has come later: a source is opened once, for the devices that there
/// are then. It is opened before the pool knows the device, since opening may fail. Or, `live`, for any device: asked
/// before steps of trainers are, for jobs that may take time from these.
class AddedDevice final : public WorkSource {
 public:
  /// `group`: of the device, which lives until its worker lets go of this.
  AddedDevice(std::shared_ptr<PoolCore> pool, DeviceGroup group, bool live)
      : pool_(std::move(pool)), group_(std::move(group)), live_(live) {}

  /// Called once: the pool has the device at this place.
  void seat(std::size_t place) noexcept {
    place_ = place;
    wake();
  }
  void wake() noexcept { wake_all(); }
  /// Of the worker, in work of that source. See DeviceGroup.
  bool replace_worker(const WorkSource& source) { return group_.replace_worker(group_.ids().front(), source); }

  [[nodiscard]] NextWork next(DeviceId, Clock::time_point) noexcept override {
    if (place_ != kNone) return live_ ? pool_->next_live(place_, *this) : pool_->next_at(place_, *this);
    return withdrawn_ ? NextWork::done() : NextWork::wait();
  }
  void perform(DeviceId device, std::int64_t work, Turn& turn) override { pool_->perform(device, work, turn); }
  void done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept override {
    pool_->done(device, work, timing);
  }
  void failed(DeviceId device, std::int64_t work, std::exception_ptr error) noexcept override {
    pool_->failed(device, work, std::move(error));
  }
  void cancel(std::exception_ptr reason) noexcept override {
    withdrawn_ = true;
    if (place_ != kNone) pool_->cancel(std::move(reason));
  }
  [[nodiscard]] bool complete() const noexcept override {
    return place_ == kNone ? withdrawn_.load() : pool_->complete();
  }

 private:
  [[nodiscard]] double part() const noexcept override { return live_ ? pool_->budget() : 0.0; }

  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::shared_ptr<PoolCore> pool_;
  DeviceGroup group_;
  bool live_;
  std::atomic<std::size_t> place_{kNone};
  std::atomic<bool> withdrawn_{false};
};

}  // namespace paceline::internal
