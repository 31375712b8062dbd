// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/comm/communicator.hpp>
#include <paceline/comm/gpu_links.hpp>
#include <paceline/comm/space_copy.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/native_stream.hpp>

namespace paceline {

struct DeviceQueueOptions {
  /// The stream that steps are ordered on; null: one of our own.
  NativeStream stream = nullptr;
  /// Micro-batches that a device may be given in addition to the one that it computes.
  std::int64_t run_ahead = 1;
  /// Longest wait for enqueued work. Work that takes longer counts as a hang.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  /// How parameters and sums move between the memory spaces of GPUs: by copies, which go on while the devices compute,
  /// or, if asked for, by NCCL after their work. Give it a shorter timeout than `timeout`; otherwise a collective that
  /// hangs is reported as a device that hangs.
  CommunicatorOptions collectives{};
  /// With NCCL: the most memory on each GPU for parameters under way, if they lie in the caller's memory.
  std::size_t staging_bytes = std::size_t{32} << 20;
  /// The most bytes that go to a sum at once; from four GPUs on, which sum a slice of them each, twice as many. By
  /// copies, each GPU has memory for about as much.
  std::size_t chunk_bytes = std::size_t{25} << 20;
  /// float16 or bfloat16: sums of float32 go between GPUs in this type, which halves what links carry. Each device's
  /// part is rounded to it once, the parts are added in float32, and the sum is rounded once. By copies only. Without
  /// two GPUs nothing changes.
  std::optional<DType> reduce_dtype{};
  /// By copies: measure the links between GPUs (measure_links), and relay parameters only if relays_pay(). Otherwise
  /// nothing is measured, and from three GPUs on parameters are relayed. They never are if no GPU has access to home's
  /// memory.
  bool measure_links = false;
};

/// A copy between home's memory and that of a device, which updates a part of the parameters.
struct DeviceCopy {
  DeviceId device{};
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// When a step's micro-batches ran, by the devices' own clocks. It may be used after later steps have begun.
class PACELINE_API StepTimes {
 public:
  virtual ~StepTimes();
  /// Whether all work that the step enqueued is done. False before end_step(). Never blocks. Any thread.
  /// @throws Error if a device has failed.
  [[nodiscard]] virtual bool settled() const = 0;
  /// Returns when that work is done. Any thread. @throws InvalidArgument before end_step(); Timeout, Error if a device
  /// or NCCL has failed; the sums of the step are then not defined.
  virtual void wait() const = 0;
  /// Replaces the host's times by the devices' times. Excludes times that are mostly launching, if the device was
  /// measured without that in this step or shortly before. Requires: settled().
  virtual void stamp(std::vector<ClaimRecord>& claims) const = 0;
};

/// The queues of a group with devices that work after the call (GPUs), and the waits between them during a step. The
/// group may have host devices, too; the work of a host device is done when its worker returns.
///
/// *Home* is the memory space of the first GPU. Parameters, their update and the reduced gradients live there. The
/// caller's own work is ordered on the home stream. The order of the work, and the wait that enforces it:
///
///   1. A device uses parameters after they are ready. Its stream waits for `ready`, which begin_step() records on the
///      home stream, and for the copies to its memory space, whose stream waited for `ready`: for all of them at once,
///      or for each bucket when it is needed, so that the first layers compute while others' parameters are under way.
///      A host worker waits on its own thread.
///      Several other GPUs form a chain: each pulls a bucket from the one before it (relayed_copies.hpp). If none of
///      them has access to home's memory, a bucket goes to the host once, and each uploads it from there.
///   2. A bucket is summed after every device has written it (bucket_sums.hpp).
///      By copies from four GPUs on, a thread of the queues enqueues these sums, and before them the copies of
///      parameters. A device's worker first waits until the copies that it needs are enqueued. Who else uses the
///      streams of copies and sums first waits until that thread has enqueued what it can.
///   3. The caller's work after the step runs after the last sum, and after all work of the devices: it is on the home
///      stream, which waits for what each device delivered.
///   4. The next step writes gradients after this reduction has read them: the writes wait for the next `ready`.
///   5. The update of the parameters, which follows the reduction, runs after every copy of them. The home stream waits
///      for each space's `arrived`, even if no device of that space had work. A space that gets no parameters in a
///      step, because none of its devices takes part, is left out.
///   6. If devices update parts of the parameters between two steps, their streams wait for the caller's work so far,
///   pull
///      what they need from home and do the update. The home stream waits for each of them and pulls the results.
///   7. After a step that failed or did not start, drain() waits for all work. The caller may then free what it used.
///
/// With NCCL between several GPUs, home has one more stream for collectives. Other spaces use the stream of their
/// copies. Then these points change:
///
///   1. The streams of all GPUs' spaces wait for `ready` before the broadcast of the parameters. Home's own devices do
///      not wait for the broadcast, because it only reads.
///   2. Nothing is summed before all devices have delivered, because NCCL's kernels wait for each other, and a worker
///   in
///      user code may hold one up. The stream of each space, home's too, waits for what its devices delivered and sums
///      it. A space without deliveries gives zeros, because all spaces must take part. Then comes the reduction to
///      home. The home stream waits for every space's `summed`, which is recorded after the reduction.
///   4. This includes the sums themselves: the home stream reads home's sum, which is written again after the next
///      `ready`.
///   5. Home's `arrived` says that home's part of the broadcast, which reads the parameters, is done.
///
/// The call that finds a failure of NCCL throws it, or else the next begin_step() or StepTimes::wait(). Discard such a
/// step; the next one makes new connections. If a call of NCCL never returns, begin_step() throws DeviceLost from then
/// on.
///
/// Lifecycle of a step: begin_step() and expect() on the caller's thread. On each worker enter(); for every micro-batch
/// slot(), then begin_run() and end_run() around it; seal() when a bucket is final; deliver() at the end. When all
/// workers have delivered, reduce() and end_step() on any one thread. These calls wait on the host only for pacing, for
/// parameters of host workers, and until the calls of NCCL, or of the thread that enqueues copies and sums, have
/// returned.
class PACELINE_API DeviceQueues {
 public:
  /// Makes NCCL's connections, or measures links if asked to, if there are several GPUs.
  /// @throws InvalidArgument if no device of the group works after the call, Unavailable if the transport asked for is
  /// not available, Error, Timeout if a device or NCCL refuses; InvalidArgument also for a reduce_dtype that is no half
  /// type, or together with NCCL, which would add in that type.
  DeviceQueues(const DeviceGroup& group, const DeviceQueueOptions& options);
  /// Like drain(), but ignores its errors.
  ~DeviceQueues();
  DeviceQueues(const DeviceQueues&) = delete;
  DeviceQueues& operator=(const DeviceQueues&) = delete;

  /// DeviceGroup::ids().
  [[nodiscard]] std::vector<DeviceId> devices() const;
  [[nodiscard]] std::size_t space_count() const noexcept;
  [[nodiscard]] std::size_t home_space() const noexcept;
  [[nodiscard]] std::size_t space_of(DeviceId device) const noexcept;
  [[nodiscard]] bool on_host(std::size_t space) const noexcept;

  /// How parameters and sums move between GPUs, with the reason. Empty if the group has one GPU only.
  [[nodiscard]] std::string transport() const;
  /// The links between the GPUs; empty if they were not measured.
  [[nodiscard]] const GpuLinks& links() const noexcept;

  /// Memory of a space: pinned on the host; on a GPU in the order of `stream`, and such that begin_step() moves its
  /// contents without staging. Destroy it before the queues, when nothing uses it.
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::size_t space, std::size_t bytes, Stream* stream) const;

  /// Gives back what the pools of the GPUs hold and nothing uses. @throws Error if a device has failed.
  void release_memory();

  /// The device that makes the resources of a space: its first device; for the host, home's.
  [[nodiscard]] AsyncDevice& maker(std::size_t space) const noexcept;
  /// Waits until no thread of the queues uses it.
  [[nodiscard]] Stream& home_stream() const noexcept;
  /// The stream that brings parameters to a foreign space and sums what its devices deliver. For home, the stream of
  /// NCCL's collectives; null without them. Waits until no thread of the queues uses it.
  [[nodiscard]] Stream* copy_stream(std::size_t space) const noexcept;
  /// The stream that a device computes on; null for host devices.
  [[nodiscard]] Stream* stream(DeviceId device) const noexcept;
  /// A stream on the home GPU that reads home's memory (a batch) for a device elsewhere; null for home's own devices.
  [[nodiscard]] Stream* source_stream(DeviceId device) const noexcept;

  /// From now on steps are ordered on this stream of the caller; null: on one of our own. The old stream must still
  /// exist, and is not used after this call. The new stream must exist until the next call, or until the queues are
  /// destroyed.
  void set_stream(NativeStream native);

  /// `takes_part`: Step::takes_part(); empty: all devices. By copies, a memory space whose devices all stay out of the
  /// step gets no parameters, and nobody waits for it. NCCL needs every GPU, so with NCCL all GPUs get them.
  /// Uses `copies` only during the call; their memory until all workers have delivered, or until drain().
  /// @throws DeviceLost after a hang; a failure of NCCL in an earlier step.
  [[nodiscard]] std::shared_ptr<const StepTimes> begin_step(std::span<const SpaceCopy> copies,
                                                            const std::vector<bool>& takes_part = {});
  /// The first call of a step makes the device's queue wait for the parameters, and returns true. If not `at_once`, it
  /// waits only for `ready`, and by copies each bucket of parameters has to be waited for by need(). @throws also what
  /// failed when a thread enqueued the copies of this step, naming the device; Timeout if a call for them does not
  /// return: the queues are hung then
  bool enter(DeviceId device, bool at_once = true);
  /// Makes the device's queue wait for this bucket of the parameters. On the device's worker. @throws like enter()
  void need(DeviceId device, std::size_t bucket);
  /// The event after which the device has at most run_ahead micro-batches in addition to the one that it computes.
  /// Null: it has no more than that now.
  [[nodiscard]] const Event* slot(DeviceId device) const;
  /// The event after which the device has no work left. Null: it was given none in this step.
  [[nodiscard]] const Event* idle(DeviceId device) const;
  /// The longest wait for either event. Call give_up() with an event that takes longer.
  [[nodiscard]] std::chrono::nanoseconds patience() const noexcept;
  /// Marks the device as hung. @throws Timeout always
  void give_up(const Event& event);
  /// True if the device had run out of work, so that the time of this run is no evidence. `continues`: this is another
  /// piece of the run before (MicroBatch::continues); both together have one time and count once.
  bool begin_run(DeviceId device, bool continues = false);
  /// Call it inside a run, when its items are on their way. The device's time until here was waiting and does not
  /// count.
  void restart_run(DeviceId device);
  void end_run(DeviceId device);
  /// Where the sums go, in home's memory, before the workers begin: outputs[k] = scale * the sum of the devices' k-th
  /// buckets.
  void expect(std::span<const BufferView> outputs, double scale);
  /// The device's k-th bucket is final: work on its stream so far has written it, or only what comes before the
  /// caller's event `written` (cudaEvent_t), which a graph has recorded. Its sum begins when every device that takes
  /// part has sealed it. A bucket that is sealed again is summed again, in the end. Any thread. @throws also what
  /// failed when buckets were summed before, in this step
  void seal(DeviceId device, std::size_t k, const BufferView& bucket, NativeEvent written = nullptr);
  /// The device has no more work. Seals its buckets; those without data are sealed already. Every device gives the same
  /// list of sizes. Host memory must be pinned. Not called for devices without work.
  void deliver(DeviceId device, const std::vector<BufferView>& parts);
  /// Sums what is not summed yet, on the home stream. @throws also what failed when buckets were summed before, naming
  /// the device; Timeout if a call for a sum does not return: the queues are hung then. When that call returns it may
  /// enqueue what it was made for, one copy for example, and nothing follows it
  void reduce();
  /// Marks the end of the step on the home stream.
  void end_step();
  /// Begins an update between two steps. The streams of these GPUs wait for the caller's work so far, and pull
  /// (copies.from is in home's memory). Enqueue the update on the streams, then call end_update(). An update may have
  /// several rounds of other parameters: begin_update() without devices only pulls, since the streams have waited.
  /// @throws DeviceLost after a hang
  void begin_update(std::span<const DeviceId> devices, std::span<const DeviceCopy> copies);
  /// The home stream waits for one device after the other and pulls its results (copies.to is in home's memory).
  void end_update(std::span<const DeviceId> devices, std::span<const DeviceCopy> copies);
  /// After a step that failed, or that did not start: returns when no enqueued work is left, or when it hangs. With
  /// copies from four GPUs on, copies and sums of this step that are not enqueued yet never are.
  /// @throws what the poll hook of waits throws (Ctrl-C); then work may still run, and the next step first waits for
  /// it.
  void drain();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with a thread that may never return
};

}  // namespace paceline
