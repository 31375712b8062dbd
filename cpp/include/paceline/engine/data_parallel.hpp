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
#include <paceline/device_id.hpp>
#include <paceline/engine/batch_plan.hpp>
#include <paceline/engine/memory_report.hpp>
#include <paceline/engine/micro_batch.hpp>
#include <paceline/engine/objective.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/cost_model.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/dtype.hpp>
#include <paceline/runtime/native_stream.hpp>

namespace paceline {

/// The memory that one device computes with: parameters, which all devices of its memory space share, and gradients of
/// its own. For a GPU both lie in the GPU's memory.
template <class T>
struct BasicReplica {
  DeviceId device{};
  std::span<const T> parameters;
  std::span<T> gradients;         ///< zero when the device's first micro-batch of a step begins; the body adds to it
  NativeStream stream = nullptr;  ///< on a GPU the cudaStream_t to enqueue everything on; null on the host
  /// On a GPU, a sum in the GPU's memory that the body may add losses to, beside those that it returns. Null on the
  /// host.
  double* loss_sum = nullptr;
  /// With MicroBatch::measure: the body writes here the most bytes that the micro-batch took. See memory_limits.
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
  /// The most bytes that a micro-batch may take on each device. 0 or an empty list: no limit. The library measures
  /// micro-batches of two sizes (BasicReplica::memory_bytes), and runs larger claims in pieces that fit. With a limit
  /// or without, a step whose body throws OutOfMemory or std::bad_alloc runs again in smaller pieces, as long as there
  /// are any.
  std::vector<std::int64_t> memory_limits{};
  /// Whether to search for a faster size of micro-batches during training, on host devices. The default is true with
  /// Balance::automatic, unless micro_batch, granularity or corrections are given.
  std::optional<bool> search_sizes{};
  /// GPUs only: the cudaStream_t that the parameters are updated on; null: a stream of the trainer's own, see stream().
  NativeStream stream = nullptr;
  /// GPUs only: how many micro-batches a device may hold beyond the one that it computes. Other devices can take over
  /// only what a slow device does not hold, so (run_ahead + 1) micro-batches stay with it.
  std::int64_t run_ahead = 1;
  /// GPUs only: the longest time for enqueued work. Work that takes longer counts as a hang: the step throws Timeout,
  /// and later steps throw DeviceLost.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  /// Several GPUs only: how parameters reach the other GPUs, and how sums of gradients reach the first GPU: by NCCL, by
  /// copies, or by NCCL where it is found. A step in which NCCL fails throws, and the next one makes new connections.
  CommunicatorOptions collectives{};
  /// Several GPUs only: DType::bfloat16 or DType::float16, in which gradients of a float trainer go from GPU to GPU.
  /// They are added in float32. Gradients in double go as they are. Not with NCCL.
  std::optional<DType> reduce_dtype{};
};

/// Data parallel training over flat parameters: the same step that paceline.torch runs, without torch.
///
/// The objective is (sum over items of w_k * l_k) / W with W the sum of the weights (the batch size by default). The
/// body adds the gradient of the plain *sum* over its items, w_k included, to the replica's gradients and returns that
/// sum; the library divides once by W. So the result is that of one device for any split, up to the order of
/// floating-point sums.
///
///   paceline::DataParallel trainer{group, {.parameter_count = n}};
///   paceline::Objective loss = trainer.step(batch_size, [&](const paceline::MicroBatch& mb, paceline::Replica&
///   replica) {
///     return backward(mb.begin, mb.end, replica.parameters, replica.gradients);   // sum of the items' losses
///   });
///   update(trainer.parameters(), trainer.gradients());
///
/// GPUs: step() returns when everything is enqueued, at most two steps ahead of the GPUs. The Objective waits when it
/// is read. parameters() and gradients() lie in the memory of the first GPU of the group, and belong to stream():
/// update them there, without waiting. Every device's work waits for what was enqueued on stream() before step(), and
/// what is enqueued there after step() comes after the reduction. Other GPUs and host devices get a copy of the
/// parameters at each step.
///
/// Threads: one step at a time. The body runs on the workers, concurrently for different devices. A body that throws
/// ends the step, unless memory ran out and smaller pieces are left to try: gradients() stays as it was, the error
/// names the device, and the next step works.
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
  /// @throws InvalidArgument if batch_size < 1, or the weight is not positive and finite; if a body threw, the error
  /// of Step::rethrow_failure(). A failure of a GPU or NCCL that shows later is thrown when the objective is read, and
  /// by the step that finds it.
  Objective step(std::int64_t batch_size, const Body& body, std::optional<double> total_weight = {});

  /// One step over items that do not cost the same. `costs` has one cost per item, in any unit (tokens), none negative.
  /// Devices get work in proportion to their speed, in micro-batches of items of similar cost, longest first. The time
  /// that an item of a certain cost takes is learned (StepLoop::plan). The body finds its items in MicroBatch::items:
  /// indices into `costs`. Its begin and end are positions in the step's own order.
  ///
  ///   trainer.step(lengths, [&](const paceline::MicroBatch& mb, paceline::Replica& replica) {
  ///     return backward(padded(mb.items), replica.parameters, replica.gradients);  // to the length of items[0]
  ///   });
  ///
  /// @throws InvalidArgument if there is no item, or a cost is negative or not finite; otherwise as above.
  Objective step(std::span<const double> costs, const Body& body, std::optional<double> total_weight = {});

  /// For optimizers that treat each parameter by itself. Calls `body(begin, end)` for parts that together make up
  /// [0, parameter_count). If all devices are host devices, the workers run the parts at the same time. With GPUs there
  /// is one call, on this thread, for everything: enqueue it on stream(). Returns when every part has run.
  ///
  ///   trainer.update([&](std::size_t begin, std::size_t end) {
  ///     for (std::size_t i = begin; i < end; ++i) trainer.parameters()[i] -= rate * trainer.gradients()[i];
  ///   });
  ///
  /// @throws what the body throws; other parts may have run.
  void update(const Update& body);

  /// From the next step on the device with this name gets no work, and no step waits for it, until restore() brings it
  /// back. Its share goes to the other devices.
  /// @throws InvalidArgument if the group has no such device, or it is the last one that works.
  void retire(std::string_view device);
  void restore(std::string_view device);

  /// What is measured of each device, for a checkpoint of yours; hint() lets another run begin with it. See
  /// StepLoop::speeds and StepLoop::hint, which says what is thrown. Waits until the times of all steps are known.
  [[nodiscard]] std::vector<std::optional<plan::CostModel>> speeds(bool by_cost = false);
  void hint(const std::vector<std::optional<plan::CostModel>>& models, bool by_cost = false);

  [[nodiscard]] std::span<T> parameters() noexcept;
  /// Of the last successful step, already divided by W. Always the same memory, as parameters().
  [[nodiscard]] std::span<T> gradients() noexcept;

  /// With GPUs in the group the cudaStream_t that parameters() and gradients() belong to; else null.
  [[nodiscard]] NativeStream stream() const noexcept;

  /// For each device with a limit: the memory that a micro-batch takes, and the largest micro-batch that fits.
  [[nodiscard]] std::vector<MemoryReport> memory_report() const;
  /// Items that each device ran in the last step.
  [[nodiscard]] const std::vector<std::int64_t>& shares() const noexcept;
  /// The last step whose times are known: on GPUs it may be two steps ago.
  [[nodiscard]] const StepRecord& last_step() const noexcept;
  /// What items cost, and the padding that was saved. None before the first step with costs.
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
