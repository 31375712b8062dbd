// SPDX-License-Identifier: Apache-2.0
#include "what_if_arguments.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.hpp>

namespace paceline::python {
namespace {

std::size_t index_of(const balance::Balancer& balancer, const std::string& name) {
  std::vector<std::string> known;
  for (const balance::DeviceProfile& device : balancer.options().devices) {
    if (device.name == name) return known.size();
    known.push_back(device.name);
  }
  throw InvalidArgument(
      fmt::format("what_if: there is no device '{}'; the devices are {}", name, fmt::join(known, ", ")));
}

}  // namespace

balance::WhatIfOptions what_if_options(const balance::Balancer& balancer, const WhatIfDevices& speeds,
                                       const WhatIfAdded& add, const std::vector<std::string>& remove,
                                       std::int64_t batch_size) {
  if (batch_size < 0) throw InvalidArgument(fmt::format("what_if: the batch has {} items", batch_size));
  balance::WhatIfOptions options;
  options.batch_size = batch_size;
  options.speeds.assign(balancer.options().devices.size(), 1.0);
  for (const auto& [name, factor] : speeds) options.speeds[index_of(balancer, name)] = factor;
  for (const auto& [like, factor] : add) {
    options.add.push_back({fmt::format("another {}", like), index_of(balancer, like), factor});
  }
  for (const std::string& name : remove) options.remove.push_back(index_of(balancer, name));
  return options;
}

}  // namespace paceline::python
