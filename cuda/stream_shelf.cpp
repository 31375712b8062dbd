// SPDX-License-Identifier: Apache-2.0
#include "stream_shelf.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include <paceline/error.hpp>

#include "device_guard.hpp"

namespace paceline::cuda {
namespace {

struct Shelves {
  std::mutex mutex;
  std::map<int, StreamShelf> of_gpu;
};

Shelves& shelves() {
  static auto* const all = new Shelves;  // never destroyed: CUDA must not be used at exit
  return *all;
}

cudaError_t query(cudaStream_t stream) {
  const cudaError_t result = cudaStreamQuery(stream);
  if (result != cudaSuccess) static_cast<void>(cudaGetLastError());
  return result;
}

bool done(cudaStream_t stream) { return query(stream) == cudaSuccess; }
bool busy(cudaStream_t stream) { return query(stream) == cudaErrorNotReady; }

}  // namespace

StreamShelf& StreamShelf::of(int device) {
  const std::lock_guard lock(shelves().mutex);
  return shelves().of_gpu.try_emplace(device, device).first->second;
}

void StreamShelf::clear_all() noexcept {
  const std::lock_guard lock(shelves().mutex);
  for (auto& [device, shelf] : shelves().of_gpu) shelf.clear();
}

cudaStream_t StreamShelf::take() {
  const std::lock_guard lock(mutex_);
  if (streams_.empty()) return nullptr;
  const DeviceGuard guard(device_);
  const auto found = std::find_if(streams_.begin(), streams_.end(), done);
  if (found == streams_.end()) return nullptr;
  const cudaStream_t stream = *found;
  streams_.erase(found);
  return stream;
}

void StreamShelf::put(cudaStream_t stream) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  } catch (...) {  // no memory for the list: the stream is leaked
  }
}

bool StreamShelf::idle() {
  const std::lock_guard lock(mutex_);
  if (streams_.empty()) return true;
  try {
    const DeviceGuard guard(device_);
    return std::none_of(streams_.begin(), streams_.end(), busy);
  } catch (const DeviceLost&) {
    return true;
  }
}

void StreamShelf::clear() noexcept {
  try {
    const std::lock_guard lock(mutex_);
    const std::vector<cudaStream_t> streams = std::exchange(streams_, {});
    if (streams.empty()) return;
    const DeviceGuard guard(device_);
    for (cudaStream_t stream : streams) static_cast<void>(cudaStreamDestroy(stream));
    static_cast<void>(cudaGetLastError());
  } catch (...) {  // the driver is shutting down, which frees the streams
  }
}

}  // namespace paceline::cuda
