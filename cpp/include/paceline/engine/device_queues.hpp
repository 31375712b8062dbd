// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/communicator.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

struct DeviceQueueOptions {
  /// What the device's library calls the stream (cudaStream_t) that steps are ordered on; null: one of our own.
  void* stream = nullptr;
  /// Micro-batches that a device may be given beyond the one it computes.
  std::int64_t run_ahead = 1;
  /// Longest wait for anything enqueued; what takes longer is taken for a hang.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  /// What moves parameters and sums between the memory spaces of GPUs. Its timeout should be the shorter one, or a
  /// collective that hangs is taken for a device that does.
  CommunicatorOptions collectives{};
  /// With NCCL: the most memory of each GPU that parameters travel through where they lie in memory of the caller's.
  std::size_t staging_bytes = std::size_t{32} << 20;
};

/// What a memory space needs of home's memory before its devices begin: parameters.
struct SpaceCopy {
  std::size_t space = 0;
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// When a step's micro-batches ran, by the devices' own clocks. May outlive the queues' next steps.
class PACELINE_API StepTimes {
 public:
  virtual ~StepTimes();
  /// Whether everything that the step enqueued is done. Never blocks. @throws Error if a device has failed.
  [[nodiscard]] virtual bool settled() const = 0;
  /// Returns when it is. @throws Timeout, Error if a device or NCCL has failed: then its sums are not defined.
  virtual void wait() const = 0;
  /// Puts the devices' times in place of the host's, and excludes those that are mostly the time of launching, where
  /// the device was measured without that in this step or shortly before. Only when settled.
  virtual void stamp(std::vector<ClaimRecord>& claims) const = 0;
};

/// The queues of a group with devices that work after the call (GPUs), and who waits for whom during a step. Host
/// devices may be among them: what their worker has done is done.
///
/// *Home* is the memory space of the first such device: parameters, their update and the reduced gradients live there,
/// and the home stream is what the caller's own work is ordered on. What must come after what, and by which wait:
///
///   1. A device's first work of a step after the parameters are ready: its stream waits for `ready` (recorded on the
///      home stream by begin_step), or for its memory space's copy, whose stream waited for `ready`. A host worker
///      waits itself.
///   2. The reduction after every device's last work: the stream that sums a space waits for what each of its devices
///      delivered, and the home stream for each space's sum.
///   3. What the caller enqueues after the step after the reduction: both are on the home stream.
///   4. The next step's first writes to gradients after this reduction has read them: they wait for its `ready`.
///   5. The update of the parameters, which follows the reduction, after every copy of them: the home stream waits for
///      each space's `arrived`, also where no device of that space had work.
///   6. After a failed step drain() waits for everything: what the step used may be taken back.
///
/// Several GPUs that NCCL connects have one more stream, home's own for collectives; other spaces' are those of their
/// copies. Then
///
///   1. holds in that the streams of all GPUs' spaces wait for `ready` before the broadcast of the parameters. Home's
///      own devices do not wait for it: it only reads.
///   2. becomes: each space's stream, home's too, waits for what its devices delivered, sums it, and gives zeros where
///      none did, since all have to take part; then comes the reduction to home; and the home stream waits for every
///      space's `summed`, recorded after it.
///   4. includes the sums themselves: home's is read by the home stream, and written again after the next `ready`.
///   5. is the same: home's `arrived` says that its part of the broadcast, which reads the parameters, is done.
///
/// What NCCL fails to do is thrown by the call that finds it, or by the next begin_step() or StepTimes::wait(). Such a
/// step is to be discarded; the next one makes new connections. Where NCCL never comes back, begin_step() throws
/// DeviceLost from then on.
///
/// Lifecycle of a step: begin_step() on the caller's thread; on each worker enter(), then slot() before and begin_run()
/// and end_run() around every micro-batch, deliver() at the end; when all have delivered, on any one thread, reduce()
/// and end_step(). Nothing here waits on the host, but for pacing, for host workers' parameters, and until NCCL's calls
/// have been made.
class PACELINE_API DeviceQueues {
 public:
  /// With several GPUs makes NCCL's connections.
  /// @throws InvalidArgument if no device of the group works after the call, Unavailable if the transport asked for
  /// cannot be had, Error, Timeout if a device or NCCL refuses.
  DeviceQueues(const DeviceGroup& group, const DeviceQueueOptions& options);
  /// As drain(), but what that throws.
  ~DeviceQueues();
  DeviceQueues(const DeviceQueues&) = delete;
  DeviceQueues& operator=(const DeviceQueues&) = delete;

  [[nodiscard]] std::size_t device_count() const noexcept;
  [[nodiscard]] std::size_t space_count() const noexcept;
  [[nodiscard]] std::size_t home_space() const noexcept;
  [[nodiscard]] std::size_t space_of(std::size_t device) const noexcept;
  [[nodiscard]] bool on_host(std::size_t space) const noexcept;

  /// How parameters and sums get from one GPU to another, and why so; empty where the group has one GPU only.
  [[nodiscard]] std::string transport() const;

  /// Memory of that space: on the host pinned; of a GPU in the order of `stream`, and such that begin_step() moves what
  /// lies in it without detours. Goes back before the queues do, when nothing uses it.
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::size_t space, std::size_t bytes, Stream* stream) const;

  /// The device that makes what a space needs: its own first one; for the host, home's.
  [[nodiscard]] AsyncDevice& maker(std::size_t space) const noexcept;
  [[nodiscard]] Stream& home_stream() const noexcept;
  /// What brings a foreign space its parameters and sums up what its devices deliver. Of home what takes part in
  /// NCCL's collectives; null without them.
  [[nodiscard]] Stream* copy_stream(std::size_t space) const noexcept;
  /// The stream that a device computes on; null for host devices.
  [[nodiscard]] Stream* stream(std::size_t device) const noexcept;
  /// On the home GPU: for reading home's memory (a batch) on behalf of a device elsewhere; null for home's own devices.
  [[nodiscard]] Stream* source_stream(std::size_t device) const noexcept;

  /// From now on steps are ordered on this stream of the caller's; null: on one of our own. The stream that is left
  /// must still exist, and is not used any more afterwards; the one that is taken must exist until it is left, or until
  /// the queues are gone.
  void set_stream(void* native);

  /// @throws DeviceLost after a hang; what NCCL failed to do in an earlier step.
  [[nodiscard]] std::shared_ptr<const StepTimes> begin_step(std::span<const SpaceCopy> copies);
  /// True the first time in a step: then it has made the device's queue wait for the parameters.
  bool enter(std::size_t device);
  /// The event after which the device has at most run_ahead micro-batches left beyond the one it computes. Null: it has
  /// no more than that already.
  [[nodiscard]] const Event* slot(std::size_t device) const;
  /// The event after which the device has nothing left to do. Null: it was given nothing in this step.
  [[nodiscard]] const Event* idle(std::size_t device) const;
  /// How long to wait for either event at most; give_up() is to be called when one has taken longer.
  [[nodiscard]] std::chrono::nanoseconds patience() const noexcept;
  /// Takes the device for hung. @throws Timeout always
  void give_up(const Event& event);
  /// True if the device had run dry: that time is not its own.
  bool begin_run(std::size_t device);
  /// Inside of a run, when its items are on their way: what the device has waited for until here is not its own time.
  void restart_run(std::size_t device);
  void end_run(std::size_t device);
  /// What to sum of this device, written by what is on its stream so far: the same list of sizes for every device.
  /// Host memory must be pinned. Not called by devices without work.
  void deliver(std::size_t device, std::vector<BufferView> parts);
  /// outputs[k] = scale * sum over the devices of their k-th part, in home's memory, on the home stream.
  void reduce(std::span<const BufferView> outputs, double scale);
  /// Marks the end of the step on the home stream.
  void end_step();
  /// After a failure: returns when nothing is enqueued any more, or what is hangs.
  /// @throws what the poll hook of waits does (Ctrl-C): then it may still run, and the next step waits for it first.
  void drain();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace paceline
