// SPDX-License-Identifier: Apache-2.0
#include "engine/pool/job_queue.hpp"

#include <utility>

#include <paceline/runtime/backend.hpp>

namespace paceline::internal {

std::unique_ptr<JobQueue> JobQueue::of(const Device& device) {
  std::unique_ptr<AsyncDevice> opened = backend_of(device).open(device);
  return opened == nullptr ? nullptr : std::make_unique<JobQueue>(std::move(opened));
}

JobQueue::JobQueue(std::unique_ptr<AsyncDevice> device)
    : device_(std::move(device)),
      stream_(device_->make_stream()),
      begun_(device_->make_event(true)),
      ended_(device_->make_event(true)) {}

void JobQueue::begin() {
  failed_ = nullptr;
  stream_->record(*begun_);
}

void JobQueue::end() noexcept {
  try {
    stream_->record(*ended_);
  } catch (...) {
    failed_ = std::current_exception();
  }
}

bool JobQueue::done() const {
  if (failed_ != nullptr) std::rethrow_exception(failed_);
  return ended_->done();
}

}  // namespace paceline::internal
