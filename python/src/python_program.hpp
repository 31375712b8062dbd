// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/per_device.hpp>

namespace paceline::python {

/// The Python body reported a failure, and keeps the exception with its traceback. Or the call of the body itself
/// raised.
class BodyFailed : public std::exception {
 public:
  /// Takes Python's current error away from the calling thread, if there is one. Requires the GIL.
  BodyFailed();
  [[nodiscard]] const char* what() const noexcept override { return "the Python body failed"; }
  /// What the call of the body raised, with its traceback, once; None if it returned. Nothing refers to it here any
  /// more, since its frames may refer to what keeps this.
  [[nodiscard]] pybind11::object take_cause() const;

 private:
  std::shared_ptr<pybind11::object> cause_;  // dropped on any thread
};

/// BodyFailed::take_cause() of an error that a worker has thrown; None for any other error, and for none.
pybind11::object take_cause(const std::exception_ptr& error);

/// Calls body(*numbers) as user code, on a worker with the GIL held. Returns a new reference. The pointer is plain,
/// because the interpreter may end inside the call, and the unwinding must not touch reference counts.
/// @throws BodyFailed if the call raises
PyObject* call_body(const pybind11::object& body, std::initializer_list<std::int64_t> numbers);

/// A step whose work is two Python callables.
///
/// run(device, begin, end, flags) -> int: 0 means done. 1 means done, but the time is no evidence. -1 means failed; the
/// callable keeps the exception. Bits of `flags`: 1 if another part of the claim has just run. 2 if run() has to return
/// (int, bytes): the same int, and the memory that the micro-batch took, or -1 bytes if there was nothing to do. 4 if
/// it is the device's last one in this step. A device that has waited for other devices in its only micro-batch returns
/// (int, 0, seconds), and these do not count as its time.
///
/// finish(device) -> list[tuple[int, int, int] | None] | None: the device's gradients, each (address, elements, DType),
/// with the parameters in the same order on all devices. An entry is None if there is no gradient, or if the caller
/// combines it. None instead of the list means failed. The gradients of a parameter are summed, in the order of the
/// devices, into the gradient of the first device that has one.
class PythonProgram : public StepProgram {
 public:
  PythonProgram(pybind11::object run, pybind11::object finish, std::span<const DeviceId> devices);
  ~PythonProgram() override;

  /// On the caller's thread, before the workers start.
  virtual void begin(const Step& /*step*/) {}
  bool run(const MicroBatch& micro_batch) override;
  std::optional<std::int64_t> memory_bytes(DeviceId device) override;
  void finish(DeviceId device) override;
  std::vector<ReductionSegment> reduction() override;
  void stamp(std::vector<ClaimRecord>& claims) const override;

  /// Drops the callables. Call it with the GIL held, when no worker runs them any more.
  virtual void release();

 protected:
  struct DeviceState {
    std::vector<BufferView> gradients{};  // what finish() returned
    std::int64_t memory_bytes = 0;        // of the last micro-batch that was measured; negative: not known
    double waited_seconds = 0.0;          // for other devices
    bool ran = false;
  };
  PerDevice<DeviceState> devices_;  // each worker writes only its own entry

 private:
  pybind11::object run_;
  pybind11::object finish_;
};

/// What the steps of a trainer share: its device queues, and the parameters to copy to other memory spaces each step.
struct TrainerQueues : DeviceQueues {
  using DeviceQueues::DeviceQueues;
  std::vector<SpaceCopy> copies{};
  /// Whether the bodies wait for the parameters themselves, bucket by bucket.
  bool in_buckets = false;
};

/// A PythonProgram for asynchronous devices. run() enqueues work. finish() returns the buckets to sum, of equal sizes
/// on every device; those that are sealed already (DeviceQueues::seal) may be None. `outputs` is a list like it, of
/// where the sums go, or None.
class QueuedProgram final : public PythonProgram {
 public:
  QueuedProgram(pybind11::object run, pybind11::object finish, const pybind11::object& outputs,
                std::shared_ptr<TrainerQueues> queues);

  /// Begins the step. The devices do not see what the caller enqueues from now on.
  void begin(const Step& step) override;
  [[nodiscard]] const Event* slot(DeviceId d) override { return queues_->slot(d); }
  [[nodiscard]] const Event* idle(DeviceId d) override { return queues_->idle(d); }
  [[nodiscard]] std::chrono::nanoseconds patience() const override { return queues_->patience(); }
  void give_up(const Event& event) override { queues_->give_up(event); }
  bool run(const MicroBatch& micro_batch) override;
  void finish(DeviceId device) override;
  std::vector<ReductionSegment> reduction() override;
  void stamp(std::vector<ClaimRecord>& claims) const override {
    times_->stamp(claims);
    PythonProgram::stamp(claims);
  }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }
  void release() override;

 private:
  std::vector<BufferView> outputs_;
  std::shared_ptr<TrainerQueues> queues_;
  std::shared_ptr<const StepTimes> times_;
};

}  // namespace paceline::python
