// SPDX-License-Identifier: Apache-2.0
#include "queued_program.hpp"

#include <utility>

#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {

QueuedProgram::QueuedProgram(std::shared_ptr<PythonProgram> body, py::object outputs,
                             std::shared_ptr<TrainerQueues> shared)
    : body_(std::move(body)),
      outputs_(std::move(outputs)),
      shared_(std::move(shared)),
      ran_(shared_->queues.device_count()) {}

QueuedProgram::~QueuedProgram() { drop(outputs_); }

void QueuedProgram::release() {
  body_->release();
  outputs_ = py::object();
  shared_.reset();  // a step may outlive its trainer
}

const Event* QueuedProgram::slot(DeviceId d) { return shared_->queues.slot(d); }
const Event* QueuedProgram::idle(DeviceId d) { return shared_->queues.idle(d); }
std::chrono::nanoseconds QueuedProgram::patience() const { return shared_->queues.patience(); }
void QueuedProgram::give_up(const Event& event) { shared_->queues.give_up(event); }

bool QueuedProgram::run(const MicroBatch& micro_batch) {
  const DeviceId d = micro_batch.device;
  shared_->queues.enter(d);
  const bool dry = shared_->queues.begin_run(d, micro_batch.continues);
  const bool first = body_->run(micro_batch);
  shared_->queues.end_run(d);
  ran_[d] = 1;
  return first || dry;
}

void QueuedProgram::finish(DeviceId d) {
  if (ran_[d] == 0) return;
  body_->finish(d);
  shared_->queues.deliver(d, body_->delivered(d));
}

std::vector<ReductionSegment> QueuedProgram::reduction() {
  const std::vector<BufferView> outputs = outputs_.is_none() ? std::vector<BufferView>{} : views_from(outputs_);
  shared_->queues.reduce(outputs, 1.0);
  shared_->queues.end_step();
  return {};
}

}  // namespace paceline::python
