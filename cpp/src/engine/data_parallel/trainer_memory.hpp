// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/objective.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/dtype.hpp>

#include "engine/dtype_of.hpp"

namespace paceline::internal {

template <class T>
class TrainerStep;

/// The memory of a trainer. This kind is for host devices only. make_async_memory() makes the other kind, for groups
/// with devices that work after the call.
template <class T>
class TrainerMemory : public std::enable_shared_from_this<TrainerMemory<T>> {
 public:
  using Body = typename BasicDataParallel<T>::Body;
  /// The sums of one device, in its memory. They are its worker's.
  struct Sums {
    std::span<T> gradients;
    double* loss = nullptr;  ///< null if there are host devices only
    bool warm = false;       ///< whether the device has run before
  };

  TrainerMemory() = default;
  TrainerMemory(std::span<const DeviceId> devices, std::size_t parameter_count)
      : storage_(devices.size() + 2, std::vector<T>(parameter_count)) {
    parameters = storage_[0];
    gradients = storage_[1];
    for (const DeviceId id : devices) sums.add(id, {.gradients = storage_[sums.size() + 2]});
  }
  virtual ~TrainerMemory() = default;

  /// `body` must live until the step has ended. Nothing happens before TrainerStep::begin().
  [[nodiscard]] virtual std::shared_ptr<TrainerStep<T>> make_step(const Body& body, double total_weight);
  [[nodiscard]] virtual NativeStream stream() const noexcept { return nullptr; }
  /// How data gets from one GPU to another. Empty if there is only one GPU.
  [[nodiscard]] virtual std::string transport() const { return {}; }
  /// Reads each objective that nobody has read, so that later failures do not change it. Requires: no device is
  /// working.
  virtual void settle_objectives() {}
  /// After a failure of enqueued work: each objective that nobody has read throws `error` from now on.
  virtual void fail_objectives(const std::exception_ptr& /*error*/) {}
  /// Whether reading an objective has thrown such an error since the last call of this function.
  [[nodiscard]] virtual bool failure_was_read() { return false; }

  std::span<T> parameters;
  std::span<T> gradients;  ///< written only when every device has succeeded
  PerDevice<Sums> sums;

 private:
  std::vector<std::vector<T>> storage_;
};

/// One step of a trainer with flat parameters.
///
/// Lifecycle: begin() on the caller's thread, the StepProgram's calls on the workers, and then on the caller's thread
/// complete() if every device succeeded, else abandon(), also if the step could not start. settled() and stamp() may be
/// asked steps later.
template <class T>
class TrainerStep : public StepProgram {
 public:
  using Body = typename TrainerMemory<T>::Body;

  TrainerStep(std::shared_ptr<TrainerMemory<T>> memory, const Body& body, double total_weight)
      : memory_(std::move(memory)), body_(body), total_weight_(total_weight), devices_(memory_->sums.ids()) {}

  virtual void begin(const Step& /*step*/) {}
  /// Returns the objective. From now on the trainer's gradients() are this step's.
  virtual Objective complete() { return Objective(loss() / total_weight_); }
  /// Waits until no device works for the step any more.
  virtual void abandon() {}

  bool run(const MicroBatch& micro_batch) override {
    const std::span<T> sum = memory_->sums[micro_batch.device].gradients;
    // Cleared by the device itself, on its own core, and only when it has work.
    if (!ran(micro_batch.device)) std::fill(sum.begin(), sum.end(), T{0});
    BasicReplica<T> replica{.device = micro_batch.device, .parameters = memory_->parameters, .gradients = sum};
    return call(micro_batch, replica);
  }

  [[nodiscard]] std::optional<std::int64_t> memory_bytes(DeviceId device) final {
    return devices_[device].memory_bytes;
  }

  std::vector<ReductionSegment> reduction() override {
    ReductionSegment segment{.output = memory_->gradients.data(),
                             .count = memory_->gradients.size(),
                             .dtype = kDTypeOf<T>,
                             .scale = 1.0 / total_weight_};
    for (const auto& [id, sums] : memory_->sums) {
      if (ran(id)) segment.inputs.push_back(sums.gradients.data());
    }
    return {std::move(segment)};
  }

 protected:
  /// Runs the body, and keeps what it returns and reports. Returns true on a device's very first run.
  bool call(const MicroBatch& micro_batch, BasicReplica<T>& replica) {
    DeviceState& device = devices_[micro_batch.device];
    device.loss += body_(micro_batch, replica);
    device.ran = true;
    device.memory_bytes = replica.memory_bytes;
    return !std::exchange(memory_->sums[micro_batch.device].warm, true);
  }
  /// Whether the body has run on the device in this step.
  [[nodiscard]] bool ran(DeviceId device) const { return devices_[device].ran; }
  /// The sum of the losses that the body has returned, in the order of the devices.
  [[nodiscard]] double loss() const {
    double sum = 0.0;
    for (const auto& [id, device] : devices_) sum += device.loss;
    return sum;
  }

  std::shared_ptr<TrainerMemory<T>> memory_;
  const Body& body_;
  double total_weight_;

 private:
  struct alignas(64) DeviceState {  // its worker's; padded, so that neighbours do not share a cache line
    bool ran = false;
    double loss = 0.0;
    std::int64_t memory_bytes = 0;
  };
  PerDevice<DeviceState> devices_;
};

template <class T>
std::shared_ptr<TrainerStep<T>> TrainerMemory<T>::make_step(const Body& body, double total_weight) {
  return std::make_shared<TrainerStep<T>>(this->shared_from_this(), body, total_weight);
}

/// @throws OutOfMemory, Error if a device refuses.
template <class T>
[[nodiscard]] std::shared_ptr<TrainerMemory<T>> make_async_memory(const DeviceGroup& group,
                                                                  const DataParallelOptions& options);

}  // namespace paceline::internal
