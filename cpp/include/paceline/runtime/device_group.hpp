// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/group_task.hpp>
#include <paceline/runtime/work_source.hpp>

namespace paceline {

/// How a source is opened (DeviceGroup::open()).
struct OpenOptions {
  /// A worker asks the source of the highest priority first, after each piece of work.
  int priority = 0;
  /// A gang, such as a step, has its devices together: it may wait on one of them for another. A worker takes part in
  /// one gang at a time. Gangs that share a device, of one group or of several, take turns in the order in which they
  /// were opened, whatever their priorities.
  bool gang = false;
};

/// An ordered set of devices, and a seat at the worker thread of each.
///
/// There is one worker for each GPU, and for each host device of the same cores, in the process. Groups with a device
/// in common share its worker, and the last group that leaves it ends it. A DeviceGroup is a handle: copies are the
/// same group, which ends with the last copy. Each worker is pinned to its device's cores, a GPU's to those that the
/// group gave which started it. A worker without work spins for a moment and then sleeps. Threads: any thread may
/// submit. After fork() the child has no workers. There every call throws Unavailable, and destruction only drops the
/// state.
///
///   paceline::DeviceGroup group = paceline::DeviceGroup::all();
///   group.run(task);                                        // task: std::shared_ptr<GroupTask>
class PACELINE_API DeviceGroup {
 public:
  /// Called on the waiting thread at least every 50 ms. Returning false ends the wait.
  using Between = std::function<bool()>;

  /// The machine's GPUs, or its host devices if it has no GPU.
  [[nodiscard]] static DeviceGroup all();
  /// Every device of this kind. A body that works on one kind only, such as one that computes on the host, asks for
  /// that kind.
  /// @throws Unavailable if there is none, with the reason.
  [[nodiscard]] static DeviceGroup all(DeviceKind kind);

  /// @throws InvalidArgument if `devices` is empty or names a device twice.
  explicit DeviceGroup(std::vector<Device> devices);
  /// Like above, by names such as "host:0". @throws InvalidArgument also if there is no such device.
  explicit DeviceGroup(std::span<const std::string> names);
  ~DeviceGroup();
  /// A move copies: the handle that was moved from still belongs to the group.
  DeviceGroup(const DeviceGroup&);
  DeviceGroup& operator=(const DeviceGroup&);

  /// Another group of the same devices, which is busy and closed on its own. Closing this group closes it, too. A
  /// trainer works on a share of the group that it is given.
  /// @throws Unavailable once closed or after fork().
  [[nodiscard]] DeviceGroup share() const;

  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] const std::vector<Device>& devices() const noexcept;
  /// The ids of devices(), in the same order. A group gives them to its devices; a share has those of its group.
  [[nodiscard]] const std::vector<DeviceId>& ids() const noexcept;
  /// @throws InvalidArgument if the group has no device of this name.
  [[nodiscard]] DeviceId id(std::string_view name) const;
  /// @throws InvalidArgument for an id of no device of the group, as place().
  [[nodiscard]] const Device& device(DeviceId id) const;
  /// The device's place in devices(), and in every list that has a value per device of the group.
  [[nodiscard]] std::size_t place(DeviceId id) const;
  /// Whether any of the devices is asynchronous, as GPUs are.
  [[nodiscard]] bool asynchronous() const;

  /// Makes the workers ask `source` for work, and returns at once. close() cancels a source that is no gang. An empty
  /// list of devices means all of the group.
  /// @throws InvalidArgument for a gang that is opened by a piece of work on a worker: no step or collective may begin
  /// inside another one, whatever its devices, since each could wait for the other. Also for a source that was opened
  /// before, and for a device that the group lacks. Unavailable once closed or after fork().
  void open(const std::shared_ptr<WorkSource>& source, const OpenOptions& options,
            std::span<const DeviceId> devices = {});
  /// Opens the source as a gang of all devices.
  void submit(const std::shared_ptr<WorkSource>& source);

  /// Waits until `source` is complete, without a time limit: user code may compile for half a minute or sit in a
  /// debugger. `between` is called at least every 50 ms. If it returns false, wait() returns false and the work goes
  /// on.
  /// @throws Cancelled if close() has withdrawn the source before it began.
  bool wait(WorkSource& source, const Between& between = {});

  /// submit(), then wait(). Returns and throws what they do.
  bool run(const std::shared_ptr<WorkSource>& source, const Between& between = {});

  /// Calls `call(device)` once, on the worker that is free first, between the pieces of other work. A piece of work
  /// that calls get() keeps its own worker, so on a group's only device it waits for ever.
  ///
  ///   std::future<double> score = group.async([&](const Device&) { return evaluate(weights); });
  ///
  /// @return its result, or what it has thrown; Cancelled if the group is closed before the call begins.
  /// @throws as open()
  template <class Call>
  [[nodiscard]] std::future<std::invoke_result_t<Call&, const Device&>> async(Call call, int priority = 0) {
    using Result = std::invoke_result_t<Call&, const Device&>;
    const auto promise = std::make_shared<std::promise<Result>>();
    open_call(
        [promise, call = std::move(call)](const Device& device) mutable {
          if constexpr (std::is_void_v<Result>) {
            call(device);
            promise->set_value();
          } else {
            promise->set_value(call(device));
          }
        },
        [promise](const std::exception_ptr& error) { promise->set_exception(error); }, priority);
    return promise->get_future();
  }

  /// Leaves the worker of a device in the work of `source` that it is in, which nobody can end. Another worker takes
  /// its place at once, in all groups. The one that is left ends with its work: the source still hears done() or
  /// failed(). Returns false, and does nothing, if the worker is in no work of this source, or the group is closed.
  /// @throws std::system_error if no thread can be started.
  bool replace_worker(DeviceId device, const WorkSource& source);

  /// True while a gang of this group, or of a share of it, is not complete.
  [[nodiscard]] bool busy() const noexcept;

  /// Leaves the workers, once they have done what this group gave them. A worker that no other group uses is ended and
  /// joined. A second call does nothing. After `timeout`, what no worker has begun is withdrawn: it never runs, and who
  /// waits for it gets Cancelled. A worker that is still inside is left behind; it ends with the process, and other
  /// groups get a new one. `between` is called as in wait(); if it returns false, close() stops waiting.
  /// @throws Timeout naming the devices that have not done in time what this group gave them.
  void close(std::chrono::nanoseconds timeout = std::chrono::seconds(10), const Between& between = {});
  [[nodiscard]] bool closed() const noexcept;

  /// Closes every open group of this process, at the end of a program or of a language runtime. Never throws. Workers
  /// that do not end in time are left behind.
  static void close_all(std::chrono::nanoseconds timeout = std::chrono::seconds(5)) noexcept;

 private:
  void open_call(std::function<void(const Device&)> call, std::function<void(const std::exception_ptr&)> fail,
                 int priority);

  std::shared_ptr<internal::GroupWorkers> workers_;
};

}  // namespace paceline
