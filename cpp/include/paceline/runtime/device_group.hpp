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
#include <paceline/runtime/group_task.hpp>
#include <paceline/runtime/work_source.hpp>

namespace paceline {

class GroupWorkers;

/// An ordered set of devices, and one worker thread per device that lives as long as the group.
///
/// A DeviceGroup is a handle: copies name the same workers, and the last one to go ends them. Workers are pinned to
/// their device's cores, park when there is nothing to do (after spinning for a moment where tasks follow each other at
/// once), and are never the caller's thread.
/// Threads: any thread may submit, one task at a time.
/// After fork() the child has no workers: there every call throws Unavailable, and destruction only drops the state.
///
///   paceline::DeviceGroup group = paceline::DeviceGroup::all();
///   group.run(task);                                        // task: std::shared_ptr<GroupTask>
class PACELINE_API DeviceGroup {
 public:
  /// Called while waiting, at least every 50 ms, on the waiting thread; false ends the wait.
  using Between = std::function<bool()>;

  /// Every device of the machine that is worth using: its GPUs, or the host devices where there is none.
  [[nodiscard]] static DeviceGroup all();
  /// Every device of this kind. What is written for one kind (a body that computes on the host) asks for that kind.
  /// @throws Unavailable if there is none, with the reason.
  [[nodiscard]] static DeviceGroup all(DeviceKind kind);

  /// @throws InvalidArgument if `devices` is empty or names a device twice.
  explicit DeviceGroup(std::vector<Device> devices);
  /// The same by name: "host:0". @throws InvalidArgument also if there is no such device.
  explicit DeviceGroup(std::span<const std::string> names);
  ~DeviceGroup();
  /// A handle that was moved from stays one of the group: a move is a copy.
  DeviceGroup(const DeviceGroup&);
  DeviceGroup& operator=(const DeviceGroup&);

  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] const std::vector<Device>& devices() const noexcept;
  /// Whether any of the devices works on after a call has returned, as GPUs do.
  [[nodiscard]] bool asynchronous() const;

  /// Makes the workers ask `source` for work, and returns at once. Of sources of priority 0 and above, which are steps
  /// and tasks, one is open at a time. Any number may be open below 0, on all devices or on some (indices; none: all):
  /// their work fills the gaps (WorkSource). close() cancels those.
  /// @throws InvalidArgument while another source of priority 0 is not complete, for a source that was opened before,
  /// and for an index that there is none of; Unavailable once closed or after fork().
  void open(const std::shared_ptr<WorkSource>& source, int priority, std::span<const std::size_t> devices = {});
  /// The same at priority 0, on all devices.
  void submit(const std::shared_ptr<WorkSource>& source);

  /// Waits until `source` is complete, without end: user code may compile for half a minute or sit in a debugger.
  /// `between` is called at least every 50 ms; when it returns false the wait ends, false comes back and the work goes
  /// on.
  bool wait(WorkSource& source, const Between& between = {});

  /// submit() and wait(), with what they return and throw.
  bool run(const std::shared_ptr<WorkSource>& source, const Between& between = {});

  /// True while a source of priority 0 is not complete.
  [[nodiscard]] bool busy() const noexcept;

  /// Ends and joins the workers; idempotent. A worker that does not come back within `timeout` is left behind (it ends
  /// with the process). `between` is called as in wait(); when it returns false nobody is waited for any more.
  /// @throws Timeout naming the devices whose workers were left behind.
  void close(std::chrono::nanoseconds timeout = std::chrono::seconds(10), const Between& between = {});
  [[nodiscard]] bool closed() const noexcept;

  /// Closes every group of this process that is still open: for the end of a program or of a language runtime. Never
  /// throws; workers that do not come back are left behind.
  static void close_all(std::chrono::nanoseconds timeout = std::chrono::seconds(5)) noexcept;

 private:
  std::shared_ptr<GroupWorkers> workers_;
};

}  // namespace paceline
