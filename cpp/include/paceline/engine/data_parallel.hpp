// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/balance/balance.hpp>
#include <paceline/comm/communicator.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/memory_report.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/objective.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

/// What one device computes with: the parameters that all devices of its memory space share, and gradients of its own.
/// On a GPU all of it lies in the GPU's memory.
template <class T>
struct BasicReplica {
  std::size_t device_index = 0;
  std::span<const T> parameters;
  std::span<T> gradients;  ///< zero when the device's first micro-batch of a step begins; add to it
  void* stream = nullptr;  ///< on a GPU the cudaStream_t to enqueue everything on; null on the host
  /// On a GPU: zero at first; what is added here counts beside what the body returns. Null on the host.
  double* loss_sum = nullptr;
  /// Where MicroBatch::measure asks for it: write here how many bytes the micro-batch took at most, for memory_limits.
  std::int64_t memory_bytes = 0;
};

struct DataParallelOptions {
  std::size_t parameter_count = 0;
  Balance balance = Balance::automatic;  ///< even and weighted: exactly the shares, nothing is taken over
  std::vector<double> weights{};         ///< for weighted: the ratios, one per device
  std::int64_t micro_batch = 0;          ///< > 0: fixed size; 0: one planned chunk per device, then corrections
  std::int64_t granularity = 1;
  /// As StepLoopOptions::corrections: with micro_batch 0, by default on host devices only.
  std::optional<bool> corrections{};
  /// How many bytes a micro-batch may take on each device, 0 for any; empty: any on all. Two sizes are measured
  /// (BasicReplica::memory_bytes), and what would take more runs in pieces. A body that throws OutOfMemory or
  /// std::bad_alloc is run again in smaller pieces, with a limit or without, as long as there are any.
  std::vector<std::int64_t> memory_limits{};
  /// Whether the size of micro-batches is searched for while training, on host devices. By default with balance "auto",
  /// where neither micro_batch nor granularity nor corrections say otherwise.
  std::optional<bool> search_sizes{};
  /// GPUs only: the cudaStream_t that the parameters are updated on; null: a stream of the trainer's own, see stream().
  void* stream = nullptr;
  /// GPUs only: how many micro-batches a device may be given beyond the one it computes. What another device could take
  /// over when this one turns slow is what it has not been given: (run_ahead + 1) micro-batches stay with it.
  std::int64_t run_ahead = 1;
  /// GPUs only: the longest that anything enqueued may take. What takes longer is taken for a hang: the step throws
  /// Timeout, and later ones DeviceLost.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  /// Several GPUs only: what brings the others their parameters, and the sums of their gradients to the first one:
  /// NCCL, copies, or NCCL where it is found. A step in which NCCL fails throws, and the next one makes new
  /// connections.
  CommunicatorOptions collectives{};
};

/// Data parallel training over flat parameters: the same step that paceline.torch runs, without torch.
///
/// The objective is (sum over items of w_k * l_k) / W with W the sum of the weights (the batch size by default). The
/// body adds the gradient of the plain *sum* over its items, w_k included, to the replica's gradients and returns that
/// sum; the library divides once by W. So the result is that of one device for any split, up to the order of
/// floating-point sums.
///
///   paceline::DataParallel trainer{group, {.parameter_count = n}};
///   double loss = trainer.step(batch_size, [&](const paceline::MicroBatch& mb, paceline::Replica& replica) {
///     return backward(mb.begin, mb.end, replica.parameters, replica.gradients);   // sum of the items' losses
///   });
///   update(trainer.parameters(), trainer.gradients());
///
/// GPUs: step() returns when everything is on its way to them, at most two steps ahead, and the Objective waits when it
/// is read. parameters() and gradients() lie in the memory of the first GPU of the group, and belong to stream():
/// update them there, without waiting. Every device's work waits for what was enqueued on it before step(), and what is
/// enqueued after step() comes after the reduction. Other GPUs and host devices get a copy of the parameters at each
/// step.
///
/// Threads: one step at a time; the body runs on the workers, concurrently for different devices. A body that throws
/// ends the step: gradients() stays as it was, the error names the device, the next step works.
template <class T>
class PACELINE_API BasicDataParallel {
 public:
  using Replica = BasicReplica<T>;
  using Body = std::function<double(const MicroBatch&, Replica&)>;
  using Update = std::function<void(std::size_t begin, std::size_t end)>;

  /// @throws InvalidArgument if parameter_count is zero, or balance and weights do not fit the group; OutOfMemory.
  BasicDataParallel(DeviceGroup group, DataParallelOptions options);
  ~BasicDataParallel();
  BasicDataParallel(const BasicDataParallel&) = delete;
  BasicDataParallel& operator=(const BasicDataParallel&) = delete;

  /// One step over `batch_size` items of total weight `total_weight` (by default the batch size). Overwrites
  /// gradients().
  /// @return the objective.
  /// @throws InvalidArgument if batch_size < 1, or the weight is not positive and finite; if a body threw, what
  /// Step::rethrow_failure() makes of it. What a GPU or NCCL finds wrong later is thrown when the objective is read,
  /// and by the step that finds it.
  Objective step(std::int64_t batch_size, const Body& body, std::optional<double> total_weight = {});

  /// One step over items that do not cost the same: one cost per item, in any unit (tokens), none negative. Devices get
  /// work in proportion to their speed, in micro-batches of items of similar cost, longest first; what an item costs in
  /// time is learned (StepLoop::plan). The body finds its items in MicroBatch::items, indices into `costs`; its
  /// begin and end are positions in the step's own order.
  ///
  ///   trainer.step(lengths, [&](const paceline::MicroBatch& mb, paceline::Replica& replica) {
  ///     return backward(padded(mb.items), replica.parameters, replica.gradients);  // to the length of items[0]
  ///   });
  ///
  /// @throws InvalidArgument without items, and for a cost that is negative or not finite; else as above.
  Objective step(std::span<const double> costs, const Body& body, std::optional<double> total_weight = {});

  /// For optimizers that treat each parameter by itself: calls `body(begin, end)` for parts of [0, parameter_count)
  /// that together are all of it, on all workers at once where all devices are the host's. Returns when every part has
  /// run. With GPUs one call on this thread has everything, to enqueue on stream().
  ///
  ///   trainer.update([&](std::size_t begin, std::size_t end) {
  ///     for (std::size_t i = begin; i < end; ++i) trainer.parameters()[i] -= rate * trainer.gradients()[i];
  ///   });
  ///
  /// @throws what the body throws; other parts may have run.
  void update(const Update& body);

  /// The device, by its name, gets no work from the next step on, and no step waits for it, until restore() brings it
  /// back. No item is lost: its share goes to the others.
  /// @throws InvalidArgument if the group has no such device, or it is the last one that works.
  void retire(std::string_view device);
  void restore(std::string_view device);

  [[nodiscard]] std::span<T> parameters() noexcept;
  /// Of the last successful step, already divided by W. Always the same memory, as parameters().
  [[nodiscard]] std::span<T> gradients() noexcept;

  /// With GPUs in the group the cudaStream_t that parameters() and gradients() belong to; else null.
  [[nodiscard]] void* stream() const noexcept;

  /// Of each device with a limit: what a micro-batch takes, and the largest that fits.
  [[nodiscard]] std::vector<MemoryReport> memory_report() const;
  /// Items that each device ran in the last step.
  [[nodiscard]] const std::vector<std::int64_t>& shares() const noexcept;
  /// The last step whose times are known: on GPUs it may be two steps ago.
  [[nodiscard]] const StepRecord& last_step() const noexcept;
  /// What items cost and what padding was saved; none before the first step with costs.
  [[nodiscard]] std::optional<ItemReport> item_report() const;
  [[nodiscard]] std::string explain() const;
  [[nodiscard]] const DeviceGroup& group() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

extern template class BasicDataParallel<float>;
extern template class BasicDataParallel<double>;

using Replica = BasicReplica<float>;
using DataParallel = BasicDataParallel<float>;

}  // namespace paceline
