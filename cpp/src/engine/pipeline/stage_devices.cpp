// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/stage_devices.hpp"

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <new>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

namespace paceline::internal {
namespace {

constexpr std::align_val_t kCacheLine{64};

class HostBuffer final : public Buffer {
 public:
  explicit HostBuffer(std::size_t bytes) : data_(::operator new(bytes, kCacheLine)), bytes_(bytes) {}
  ~HostBuffer() override { ::operator delete(data_, kCacheLine); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  [[nodiscard]] void* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace

StageDevices::StageDevices(const DeviceGroup& group, std::chrono::nanoseconds timeout) : timeout_(timeout) {
  std::map<std::string, std::size_t> spaces;
  for (const DeviceId id : group.ids()) {
    const Device& device = group.device(id);
    Entry& entry = devices_.add(id);
    entry.name = device.name;
    entry.space = spaces.emplace(device.memory_space, spaces.size()).first->second;
    entry.opened = backend_of(device).open(device);
    if (entry.opened == nullptr) continue;
    entry.work = entry.opened->make_stream();
    if (pinning_ == nullptr) pinning_ = entry.opened.get();
  }
}

std::unique_ptr<Buffer> StageDevices::allocate(DeviceId device, std::size_t bytes) const {
  const Entry& entry = devices_[device];
  if (entry.opened != nullptr) {
    try {
      return entry.opened->allocate(bytes, *entry.work);
    } catch (const OutOfMemory& error) {  // it may name the whole GPU
      throw OutOfMemory(error.what(), entry.name);
    }
  }
  if (pinning_ != nullptr) return pinning_->allocate_pinned(bytes);
  try {
    return std::make_unique<HostBuffer>(bytes);
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(fmt::format("pipeline: {} has no memory for {} bytes", entry.name, bytes), entry.name);
  }
}

void StageDevices::zero(DeviceId device, void* data, std::size_t bytes) const {
  if (bytes == 0) return;
  if (Stream* const stream = work(device)) {
    stream->zero(data, bytes);
  } else {
    std::memset(data, 0, bytes);
  }
}

void StageDevices::drain(AsyncDevice* device, Stream* stream) noexcept {
  try {
    hung_.drain(device, stream, timeout_);
  } catch (...) {  // interrupted
  }
}

void StageDevices::drain() noexcept {
  for (const auto& [id, entry] : devices_) drain(entry.opened.get(), entry.work.get());
}

}  // namespace paceline::internal
