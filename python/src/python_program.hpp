// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/device_id.hpp>
#include <paceline/engine/step.hpp>

namespace paceline::python {

/// The Python body reported a failure. The body keeps the exception with its traceback.
class BodyFailed : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override { return "the Python body failed"; }
};

/// A step whose work is two Python callables.
///
/// run(device, begin, end, flags) -> int: 0 means done. 1 means done, but the time is no evidence. -1 means failed; the
/// callable keeps the exception. Bits of `flags`: 1 if another part of the claim has just run. 2 if run() has to return
/// (int, bytes): the same int, and the memory that the micro-batch took, or -1 bytes if there was nothing to do.
///
/// finish(device) -> list[tuple[int, int, int] | None] | None: the device's gradients, each (address, elements, DType),
/// with the parameters in the same order on all devices. An entry is None if there is no gradient, or if the caller
/// combines it. None instead of the list means failed. The gradients of a parameter are summed, in the order of the
/// devices, into the gradient of the first device that has one.
class PythonProgram final : public StepProgram {
 public:
  PythonProgram(pybind11::object run, pybind11::object finish, std::size_t device_count);
  ~PythonProgram() override;

  bool run(const MicroBatch& micro_batch) override;
  std::optional<std::int64_t> memory_bytes(DeviceId device) override;
  void finish(DeviceId device) override;
  std::vector<ReductionSegment> reduction() override;

  /// What finish() returned for a device.
  [[nodiscard]] const std::vector<BufferView>& delivered(DeviceId device) const { return devices_[device].gradients; }

  /// Drops the callables. Call it with the GIL held, when no worker runs them any more.
  void release();

 private:
  pybind11::object run_;
  pybind11::object finish_;
  struct DeviceState {
    std::vector<BufferView> gradients;  // what finish() returned
    std::int64_t memory_bytes = 0;      // of the last micro-batch that was measured; negative: not known
  };
  std::vector<DeviceState> devices_;
};

/// Calls `callable`, without arguments, on a worker. It returns a list like finish(). @throws BodyFailed
std::vector<BufferView> views_from(const pybind11::object& callable);

}  // namespace paceline::python
