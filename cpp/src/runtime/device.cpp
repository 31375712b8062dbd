// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/device.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

#include "runtime/builtin_backends.hpp"

namespace paceline {
Backend::~Backend() = default;
std::string Backend::why_none() const { return {}; }
std::string Backend::why_in_turns() const { return {}; }
std::unique_ptr<AsyncDevice> Backend::open(const Device&) const { return nullptr; }
std::vector<DeviceHealth> Backend::health(std::span<const Device> devices) const {
  return std::vector<DeviceHealth>(devices.size());
}

std::vector<GpuFacts> Backend::gpu_facts() const { return {}; }

std::vector<GpuFacts> gpu_facts() {
  const Backend* const gpus = internal::gpu_backend();
  return gpus == nullptr ? std::vector<GpuFacts>{} : gpus->gpu_facts();
}

std::span<const Backend* const> backends() noexcept {
  static const Backend* const all[] = {internal::gpu_backend(), &internal::host_backend()};
  return std::span(all).subspan(all[0] == nullptr ? 1 : 0);
}

const Backend& backend_of(const Device& device) {
  for (const Backend* backend : backends()) {
    if (backend->kind() == device.kind) return *backend;
  }
  throw Unavailable(fmt::format("{}: this build has no backend for such devices", device.name), device.name);
}

std::vector<Device> devices() {
  std::vector<Device> found;
  for (const Backend* backend : backends()) {
    for (Device& device : backend->devices()) found.push_back(std::move(device));
  }
  return found;
}

Device find_device(std::string_view name) {
  std::string reason;
  try {
    for (const Backend* backend : backends()) {
      const std::string_view prefix = backend->prefix();
      if (name == prefix) {
        throw InvalidArgument(
            fmt::format("'{0}' is not the name of a device: they have numbers, {0}:0, {0}:1, ...", name));
      }
      if (name.starts_with(prefix) && name.size() > prefix.size() && name[prefix.size()] == ':') {
        return backend->find(name);
      }
    }
    reason = internal::why_no_gpu(name);
    if (reason.empty()) {
      reason = fmt::format("'{}' is not the name of a device: host devices are called host:0, host:1, ...", name);
    }
  } catch (const InvalidArgument& error) {
    reason = error.what();  // a backend lists its own devices; the message below lists all
  }
  std::vector<std::string> names;
  for (const Device& device : devices()) names.push_back(device.name);
  throw InvalidArgument(
      fmt::format("{}; name some of the devices of this machine: {}", reason, fmt::join(names, ", ")));
}

}  // namespace paceline
