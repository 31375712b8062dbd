// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline {

/// Work for the workers of a group. Workers hold it only while they run it.
class PACELINE_API GroupTask {
 public:
  virtual ~GroupTask();
  /// Runs once on each device's worker thread, concurrently. Must not throw: keep errors in the task.
  virtual void run(std::size_t device_index) noexcept = 0;
  /// True when the caller need not wait for workers that have not come in yet or have not left.
  [[nodiscard]] virtual bool complete() const noexcept = 0;
};

/// An ordered set of devices, and one worker thread per device that lives as long as the group.
///
/// Threads: workers park when there is nothing to do. submit() and wait() may be called from any thread, one
/// task at a time; a second submit() while one runs throws InvalidArgument. The group must not be closed by one of its workers.
/// After fork() the child owns no workers: there every call but destruction throws Unavailable and destruction drops the state.
class PACELINE_API DeviceGroup {
 public:
  /// Every device of the machine that is worth using: host devices where there is no GPU.
  [[nodiscard]] static DeviceGroup all();

  /// @throws InvalidArgument if `devices` is empty or names a device twice.
  explicit DeviceGroup(std::vector<Device> devices);
  explicit DeviceGroup(std::span<const std::string> names);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&);              // another handle to the same workers
  DeviceGroup& operator=(const DeviceGroup&);
  DeviceGroup(DeviceGroup&&) noexcept;
  DeviceGroup& operator=(DeviceGroup&&) noexcept;

  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] const std::vector<Device>& devices() const noexcept;

  /// Gives `task` to every worker. Returns at once.
  void submit(std::shared_ptr<GroupTask> task);

  /// Waits until the submitted task is complete and no worker runs it, at most `timeout`. True when done.
  /// Waking slice by slice lets the caller look for signals.
  [[nodiscard]] bool wait(std::chrono::nanoseconds timeout);

  /// submit() and wait() without end: calls `between` at least every 50 ms while waiting (signals); if it returns false,
  /// waiting ends and false comes back with the task still running.
  bool run(std::shared_ptr<GroupTask> task, const std::function<bool()>& between = {});

  /// Ends and joins the workers; idempotent. Waits for a running task at most `timeout`, then leaves its threads behind
  /// (they end with the process) and throws Timeout naming the devices that are stuck.
  void close(std::chrono::nanoseconds timeout = std::chrono::seconds(10));
  [[nodiscard]] bool closed() const noexcept;

  class State;
  [[nodiscard]] const std::shared_ptr<State>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace paceline
