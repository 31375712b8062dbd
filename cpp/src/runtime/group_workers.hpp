// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/work_source.hpp>

#include "runtime/short_wait.hpp"

namespace paceline::internal {

// The longest time that a wait goes without calling `between`.
inline constexpr std::chrono::milliseconds kBetweenInterval{50};

/// What the handles of one group have in common: its places at the workers of its devices, and what it has opened.
class GroupWorkers {
 public:
  /// `whole`: the group that this one is a share of, if it is one. It lives as long as its shares.
  explicit GroupWorkers(std::vector<Device> devices, std::shared_ptr<GroupWorkers> whole = nullptr);
  ~GroupWorkers();
  GroupWorkers(const GroupWorkers&) = delete;
  GroupWorkers& operator=(const GroupWorkers&) = delete;

  [[nodiscard]] const std::vector<Device>& devices() const noexcept { return devices_; }
  [[nodiscard]] const std::vector<DeviceId>& ids() const noexcept { return ids_; }
  /// @throws Unavailable once closed or after fork().
  void check_usable(const char* call) const;
  /// See DeviceGroup::share().
  void add_share(const std::shared_ptr<GroupWorkers>& share);
  /// See DeviceGroup::open().
  void open(const std::shared_ptr<WorkSource>& source, const OpenOptions& options, std::span<const DeviceId> devices);
  /// See DeviceGroup::replace_worker().
  bool replace_worker(DeviceId device, const WorkSource& source);
  [[nodiscard]] bool busy() const noexcept;
  /// One wait of DeviceGroup::wait(): spins for a moment, then calls `sleep`.
  template <class Done, class Sleep>
  bool await(Done done, Sleep sleep) {
    return callers_wait_.until(!on_a_workers_core(), done, sleep);
  }
  void close(std::chrono::nanoseconds timeout, const std::function<bool()>& between = {});
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }

 private:
  struct State;  // that a forked child must not touch

  GroupWorkers(std::vector<Device> devices, std::shared_ptr<GroupWorkers> whole, pid_t owner);
  void await_ready();
  [[nodiscard]] bool on_a_workers_core() const noexcept;
  [[nodiscard]] bool forked() const noexcept;
  void close_own(std::chrono::nanoseconds timeout, const std::function<bool()>& between);
  [[nodiscard]] bool needs(Worker& first) const noexcept;

  std::vector<Device> devices_;
  std::vector<DeviceId> ids_;  // of each; they ascend
  std::shared_ptr<GroupWorkers> whole_;
  pid_t owner_;
  std::atomic<bool> closed_{false};
  ShortWait callers_wait_;
  State* state_;  // leaked on purpose in a forked child
};

}  // namespace paceline::internal
