// SPDX-License-Identifier: Apache-2.0
//
// Entry points of the CUDA runtime for streams and events.
#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "driver.hpp"
#include "entry_points.hpp"

using fake::as_stream;
using fake::fail;
using fake::machine;
using fake::use_context;

namespace {

fake::Event* as_event(cudaEvent_t event) { return reinterpret_cast<fake::Event*>(event); }

}  // namespace

fake::Stream* fake::as_stream(cudaStream_t stream) {
  auto* const found = machine().resolve(stream);
  if (found == nullptr) misuse("the legacy default stream was used without saying so: cudaStreamLegacy");
  if (!machine().known(found)) misuse("a stream that was destroyed was used");
  return found;
}

cudaError_t fake::enqueue(cudaStream_t stream, const char* name, std::function<void()> body) {
  Stream* const target = as_stream(stream);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  Operation operation;
  operation.name = name;
  operation.body = std::move(body);
  machine().enqueue(target, std::move(operation));
  return cudaSuccess;
}

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  if (flags != cudaStreamNonBlocking) fake::misuse("a stream that waits for the legacy default stream was made");
  if (const cudaError_t error = machine().health(fake::current_device()); error != cudaSuccess) return fail(error);
  *stream = reinterpret_cast<cudaStream_t>(machine().make_stream(fake::current_device()));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  return machine().destroy(reinterpret_cast<fake::Stream*>(stream)) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  fake::Stream* const target = as_stream(stream);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  if (machine().event_failure_is_due()) return fail(cudaErrorUnknown);
  machine().wait(target, as_event(event));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  if (!machine().known(machine().resolve(stream))) return cudaErrorInvalidResourceHandle;  // from an earlier machine
  fake::Stream* const target = as_stream(stream);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  return machine().query(target) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  if (const cudaError_t error = machine().health(fake::current_device()); error != cudaSuccess) return fail(error);
  const bool timed = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(machine().make_event(fake::current_device(), timed));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  return machine().destroy(as_event(event)) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  use_context(__func__);
  fake::Stream* const target = as_stream(stream);
  if (as_event(event)->device != target->device) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = machine().health(target->device); error != cudaSuccess) return fail(error);
  if (machine().event_failure_is_due()) return fail(cudaErrorUnknown);
  machine().record(target, as_event(event));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(machine().mutex);
  if (const cudaError_t error = machine().health(as_event(event)->device); error != cudaSuccess) return fail(error);
  const auto recording = as_event(event)->latest;
  if (recording == nullptr) fake::misuse("an event that was never recorded was asked whether it is over");
  return machine().query(*recording) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const std::lock_guard lock(machine().mutex);
  const fake::Event* const first = as_event(begin);
  const fake::Event* const second = as_event(end);
  if (const cudaError_t error = machine().health(second->device); error != cudaSuccess) return fail(error);
  if (!first->timed || !second->timed || first->device != second->device) return fail(cudaErrorInvalidResourceHandle);
  if (first->latest == nullptr || second->latest == nullptr) fake::misuse("time from an event that was never recorded");
  const auto seen = [](const fake::Recording& one) { return one.done && machine().queries >= one.visible; };
  if (!seen(*first->latest) || !seen(*second->latest)) return fail(cudaErrorNotReady);
  *milliseconds = static_cast<float>((second->latest->seconds - first->latest->seconds) * 1e3);
  return cudaSuccess;
}

}  // extern "C"
