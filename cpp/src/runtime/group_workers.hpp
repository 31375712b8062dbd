// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/work_source.hpp>

#include "runtime/short_wait.hpp"
#include "runtime/worker.hpp"

namespace paceline {

// The longest time that a wait goes without calling `between`.
inline constexpr std::chrono::milliseconds kBetweenInterval{50};

/// The workers behind the handles of one group.
class GroupWorkers {
 public:
  explicit GroupWorkers(std::vector<Device> devices);
  ~GroupWorkers();
  GroupWorkers(const GroupWorkers&) = delete;
  GroupWorkers& operator=(const GroupWorkers&) = delete;

  [[nodiscard]] const std::vector<Device>& devices() const noexcept { return devices_; }
  /// See DeviceGroup::open().
  void open(const std::shared_ptr<WorkSource>& source, int priority, std::span<const DeviceId> devices);
  [[nodiscard]] bool busy() const noexcept;
  /// One wait of DeviceGroup::wait(): spins for a moment, then calls `sleep`.
  template <class Done, class Sleep>
  bool await(Done done, Sleep sleep) {
    return callers_wait_.until(!on_a_workers_core(), done, sleep);
  }
  void close(std::chrono::nanoseconds timeout, const std::function<bool()>& between = {});
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }

  /// Waits until every worker that a close() left behind has ended, or the time is over.
  static void await_left_behind(std::chrono::nanoseconds timeout) noexcept;

 private:
  struct Threads;  // state that a forked child must not touch

  GroupWorkers(std::vector<Device> devices, pid_t owner);
  void await_ready();
  [[nodiscard]] bool on_a_workers_core() const noexcept;
  [[nodiscard]] bool forked() const noexcept;

  std::vector<Device> devices_;
  pid_t owner_;
  std::atomic<bool> closed_{false};
  internal::ShortWait callers_wait_;
  Threads* threads_;  // leaked on purpose in a forked child
};

}  // namespace paceline
