// SPDX-License-Identifier: Apache-2.0
#include "runtime/host_backend.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <system_error>

#include <paceline/error.hpp>
#include <paceline/runtime/host_topology.hpp>

#include "runtime/host_health.hpp"
#include "runtime/thread_place.hpp"

namespace paceline {

std::vector<Device> HostBackend::devices() const {
  const HostTopology topology = read_host_topology();
  std::vector<Device> found;
  for (std::int32_t index = 0; index < topology.device_count; ++index) found.push_back(host_device(topology, index));
  return found;
}

Device HostBackend::find(std::string_view name) const {
  // More workers than cores are allowed, but each costs a thread. A larger index is most likely a typing mistake.
  constexpr std::int32_t max_index = 4095;
  const std::string_view digits = name.substr(prefix().size() + 1);
  std::int32_t index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  const bool canonical = digits == "0" || (!digits.empty() && digits.front() >= '1' && digits.front() <= '9');
  if (canonical && error == std::errc{} && end == digits.data() + digits.size() && index <= max_index) {
    return host_device(read_host_topology(), index);
  }
  throw InvalidArgument(
      fmt::format("'{}' is not the name of a device: host devices are called host:0, host:1, ... (up to host:{})", name,
                  max_index));
}

void HostBackend::prepare_worker(const Device& device) const noexcept { pin_this_thread(device.cores); }

std::vector<DeviceHealth> HostBackend::health(std::span<const Device> devices) const {
  const HostCounters counters("/", sysconf(_SC_CLK_TCK));
  std::vector<DeviceHealth> health;
  for (const Device& device : devices) health.emplace_back(counters.health_of(device.cores));
  return health;
}

}  // namespace paceline
