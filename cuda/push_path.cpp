// SPDX-License-Identifier: Apache-2.0
#include "push_path.hpp"

#include <paceline/error.hpp>

#include "cuda_device.hpp"

namespace paceline::cuda {

PushPath::PushPath(int source, int target)
    : from_{source},
      to_{target},
      source_(open_device(source)),
      out_(source_->make_stream()),
      pushed_(source_->make_event(false)) {}

void PushPath::copy(Stream& stream, Event& begun, void* to, const void* from, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  stream.record(begun);
  out_->wait(begun);
  const auto let_wait = [&] {
    out_->record(*pushed_);
    stream.wait(*pushed_);
  };
  try {
    out_->copy(to, to_, from, from_, bytes);
    let_wait();
  } catch (...) {
    try {
      let_wait();             // for what was enqueued, as the stream's owner believes
    } catch (const Error&) {  // a lost device has no work left
    }
    throw;
  }
}

}  // namespace paceline::cuda
