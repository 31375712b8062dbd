// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step.hpp>

#include "python_program.hpp"

namespace paceline::python {

/// What a trainer's steps share: the queues of its devices, and the parameters that other memory spaces get each step.
struct TrainerQueues {
  TrainerQueues(const DeviceGroup& group, const DeviceQueueOptions& options) : queues(group, options) {}
  DeviceQueues queues;
  std::vector<SpaceCopy> copies;
};

/// A PythonProgram on devices that work after the call. Its run() enqueues; finish() gives what to sum, of the same
/// sizes for every device; outputs() is called once, when all have given theirs, and says where the sums go.
class QueuedProgram final : public StepProgram {
 public:
  /// Begins the step: what the caller enqueues from now on is not seen by the devices.
  QueuedProgram(std::shared_ptr<PythonProgram> body, pybind11::object outputs, std::shared_ptr<TrainerQueues> shared);
  ~QueuedProgram() override;

  [[nodiscard]] const Event* slot(std::size_t device_index) override;
  [[nodiscard]] const Event* idle(std::size_t device_index) override;
  [[nodiscard]] std::chrono::nanoseconds patience() const override;
  void give_up(const Event& event) override;
  bool run(const MicroBatch& micro_batch) override;
  std::optional<std::int64_t> memory_bytes(std::size_t d) override { return body_->memory_bytes(d); }
  void finish(std::size_t device_index) override;
  std::unique_ptr<BlockReduction> reduction() override;
  void stamp(std::vector<ClaimRecord>& claims) const override { times_->stamp(claims); }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }

  /// As PythonProgram::release().
  void release();

 private:
  std::shared_ptr<PythonProgram> body_;
  pybind11::object outputs_;
  std::shared_ptr<TrainerQueues> shared_;
  std::shared_ptr<const StepTimes> times_;
  std::vector<char> ran_;  // each entry is its worker's
};

}  // namespace paceline::python
