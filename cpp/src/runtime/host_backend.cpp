// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <optional>

#include <paceline/error.hpp>
#include <paceline/runtime/host_topology.hpp>

#include "runtime/builtin_backends.hpp"
#include "runtime/host_health.hpp"
#include "runtime/text_file.hpp"
#include "runtime/thread_place.hpp"

namespace paceline {
namespace {

/// CPU cores as synchronous devices in one memory space, with one pinned worker each.
class HostBackend final : public Backend {
 public:
  [[nodiscard]] DeviceKind kind() const noexcept override { return DeviceKind::host; }
  [[nodiscard]] std::string_view prefix() const noexcept override { return "host"; }

  [[nodiscard]] std::vector<Device> devices() const override {
    const HostTopology topology = read_host_topology();
    std::vector<Device> found;
    for (std::int32_t index = 0; index < topology.device_count; ++index) found.push_back(host_device(topology, index));
    return found;
  }

  [[nodiscard]] Device find(std::string_view name) const override {
    // More workers than cores are allowed, but each costs a thread. A larger index is most likely a typing mistake.
    constexpr std::int32_t max_index = 4095;
    const std::optional<std::int32_t> index = internal::parse_index(name.substr(prefix().size() + 1));
    if (index && *index <= max_index) return host_device(read_host_topology(), *index);
    throw InvalidArgument(
        fmt::format("'{}' is not the name of a device: host devices are called host:0, host:1, ... (up to host:{})",
                    name, max_index));
  }

  void prepare_worker(const Device& device) const noexcept override { internal::pin_this_thread(device.cores); }

  [[nodiscard]] bool asynchronous() const noexcept override { return false; }

  [[nodiscard]] std::vector<DeviceHealth> health(std::span<const Device> devices) const override {
    const internal::HostCounters counters("/", sysconf(_SC_CLK_TCK));
    std::vector<DeviceHealth> health;
    for (const Device& device : devices) health.emplace_back(counters.health_of(device.cores));
    return health;
  }
};

}  // namespace

const Backend& internal::host_backend() noexcept {
  static const HostBackend backend;
  return backend;
}

}  // namespace paceline
