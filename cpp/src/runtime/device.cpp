// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/device.hpp>

#include <charconv>
#include <system_error>

#include <fmt/format.h>

#include <paceline/error.hpp>
#include <paceline/runtime/host_topology.hpp>

namespace paceline {
namespace {

std::string join_names(const std::vector<Device>& devices) {
  std::string names;
  for (const Device& device : devices) names += (names.empty() ? "" : ", ") + device.name;
  return names;
}

}  // namespace

std::vector<Device> devices() {
  const HostTopology topology = read_host_topology();
  std::vector<Device> found;
  for (std::int32_t index = 0; index < topology.device_count; ++index) found.push_back(host_device(topology, index));
  return found;
}

Device find_device(std::string_view name) {
  constexpr std::string_view prefix = "host:";
  // More workers than cores is legal, but a name beyond this is a typing mistake: each costs a thread.
  constexpr std::int32_t max_index = 4095;
  if (name.starts_with(prefix)) {
    const std::string_view digits = name.substr(prefix.size());
    std::int32_t index = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    const bool canonical = digits == "0" || (!digits.empty() && digits.front() >= '1' && digits.front() <= '9');
    if (canonical && error == std::errc{} && end == digits.data() + digits.size() && index <= max_index) {
      return host_device(read_host_topology(), index);
    }
  }
  const std::string present = join_names(devices());
  if (name.starts_with("cuda:") || name == "cuda") {
    throw InvalidArgument(
        fmt::format("there is no device '{}': this build has no CUDA backend, only host devices; "
                    "devices of this machine: {}",
                    name, present));
  }
  throw InvalidArgument(
      fmt::format("'{}' is not the name of a device: host devices are called host:0, host:1, ... "
                  "(up to host:{}); devices of this machine: {}",
                  name, max_index, present));
}

}  // namespace paceline
