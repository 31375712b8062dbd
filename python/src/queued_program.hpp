// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step.hpp>

#include "python_program.hpp"

namespace paceline::python {

/// What the steps of a trainer share: its device queues, and the parameters to copy to other memory spaces each step.
struct TrainerQueues {
  TrainerQueues(const DeviceGroup& group, const DeviceQueueOptions& options) : queues(group, options) {}
  DeviceQueues queues;
  std::vector<SpaceCopy> copies;
};

/// A PythonProgram for asynchronous devices. run() enqueues work. finish() returns the buffers to sum, of equal sizes
/// on every device. outputs() is called once, after every device's finish(), and returns where the sums go.
class QueuedProgram final : public StepProgram {
 public:
  QueuedProgram(std::shared_ptr<PythonProgram> body, pybind11::object outputs, std::shared_ptr<TrainerQueues> shared);
  ~QueuedProgram() override;

  /// Begins the step. The devices do not see what the caller enqueues from now on.
  void begin(const Step& step) { times_ = shared_->queues.begin_step(shared_->copies, step.takes_part()); }

  [[nodiscard]] const Event* slot(DeviceId device) override;
  [[nodiscard]] const Event* idle(DeviceId device) override;
  [[nodiscard]] std::chrono::nanoseconds patience() const override;
  void give_up(const Event& event) override;
  bool run(const MicroBatch& micro_batch) override;
  std::optional<std::int64_t> memory_bytes(DeviceId d) override { return body_->memory_bytes(d); }
  void finish(DeviceId device) override;
  std::vector<ReductionSegment> reduction() override;
  void stamp(std::vector<ClaimRecord>& claims) const override { times_->stamp(claims); }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }

  /// See PythonProgram::release().
  void release();

 private:
  std::shared_ptr<PythonProgram> body_;
  pybind11::object outputs_;
  std::shared_ptr<TrainerQueues> shared_;
  std::shared_ptr<const StepTimes> times_;
  std::vector<char> ran_;  // each worker writes only its own entry
};

}  // namespace paceline::python
