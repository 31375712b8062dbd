// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/objective.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/dtype.hpp>

namespace paceline {

/// One step of a trainer with flat parameters.
///
/// Lifecycle: begin() on the caller's thread, the StepProgram's calls on the workers, and then on the caller's thread
/// complete() if every device succeeded, else abandon(). settled() and stamp() may be asked steps later.
class TrainerStep : public StepProgram {
 public:
  explicit TrainerStep(std::size_t device_count) : devices_(device_count) {}

  [[nodiscard]] std::optional<std::int64_t> memory_bytes(DeviceId device) final {
    return devices_[device].memory_bytes;
  }
  virtual void begin(const Step& step) = 0;
  /// Returns the objective. From now on the trainer's gradients() are this step's.
  virtual Objective complete() = 0;
  /// Waits until no device works for the failed step any more.
  virtual void abandon() = 0;

 protected:
  /// Runs the body, and keeps the memory that it reports.
  template <class Body, class Replica>
  double call(const Body& body, const MicroBatch& micro_batch, Replica& replica) {
    const double loss = body(micro_batch, replica);
    DeviceState& device = devices_[micro_batch.device];
    device.ran = true;
    device.memory_bytes = replica.memory_bytes;
    return loss;
  }
  /// Whether the body has run on the device in this step.
  [[nodiscard]] bool ran(DeviceId device) const { return devices_[device].ran; }
  /// Adds to the sum of the losses that the body returned on the device.
  void add_loss(DeviceId device, double loss) { devices_[device].loss += loss; }
  /// The sum over all devices, in their order.
  [[nodiscard]] double loss() const {
    double sum = 0.0;
    for (const DeviceState& device : devices_) sum += device.loss;
    return sum;
  }

 private:
  struct alignas(64) DeviceState {  // its worker's; padded, so that neighbours do not share a cache line
    bool ran = false;
    double loss = 0.0;
    std::int64_t memory_bytes = 0;
  };
  std::vector<DeviceState> devices_;
};

/// The memory of a trainer. One kind is for host devices only, the other for groups with devices that work after the
/// call.
template <class T>
class TrainerMemory {
 public:
  using Body = typename BasicDataParallel<T>::Body;

  virtual ~TrainerMemory() = default;
  /// `body` must live until the step has ended. Nothing happens before TrainerStep::begin().
  [[nodiscard]] virtual std::shared_ptr<TrainerStep> make_step(const Body& body, double total_weight) = 0;
  [[nodiscard]] virtual std::span<T> parameters() noexcept = 0;
  [[nodiscard]] virtual std::span<T> gradients() noexcept = 0;
  [[nodiscard]] virtual void* stream() const noexcept { return nullptr; }
  /// How data gets from one GPU to another. Empty if there is only one GPU.
  [[nodiscard]] virtual std::string transport() const { return {}; }
  /// Reads each objective that nobody has read, so that later failures do not change it. Requires: no device is
  /// working.
  virtual void settle_objectives() {}
  /// After a failure of enqueued work: each objective that nobody has read throws `error` from now on.
  virtual void fail_objectives(const std::exception_ptr& /*error*/) {}
  /// Whether reading an objective has thrown such an error since the last call of this function.
  [[nodiscard]] virtual bool failure_was_read() { return false; }
};

template <class T>
inline constexpr DType kDTypeOf = sizeof(T) == 4 ? DType::float32 : DType::float64;

/// @throws OutOfMemory, Error if a device refuses.
template <class T>
[[nodiscard]] std::shared_ptr<TrainerMemory<T>> make_host_memory(const DeviceGroup& group,
                                                                 const DataParallelOptions& options);
template <class T>
[[nodiscard]] std::shared_ptr<TrainerMemory<T>> make_async_memory(const DeviceGroup& group,
                                                                  const DataParallelOptions& options);

extern template std::shared_ptr<TrainerMemory<float>> make_host_memory(const DeviceGroup&, const DataParallelOptions&);
extern template std::shared_ptr<TrainerMemory<double>> make_host_memory(const DeviceGroup&, const DataParallelOptions&);
extern template std::shared_ptr<TrainerMemory<float>> make_async_memory(const DeviceGroup&, const DataParallelOptions&);
extern template std::shared_ptr<TrainerMemory<double>> make_async_memory(const DeviceGroup&,
                                                                         const DataParallelOptions&);

}  // namespace paceline
