// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/partition.hpp>

#include <fmt/format.h>

#include <cmath>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>

namespace paceline {
namespace {

void require_fractions(const Device& device, std::span<const double> fractions) {
  constexpr double rounding = 1e-9;  // allows for rounding in computed fractions, such as ten times 0.1
  if (fractions.empty()) {
    throw InvalidArgument(
        fmt::format("partition: no fractions of {} are given. Name one for each part, e.g. {{0.75, 0.25}}.",
                    device.name),
        device.name);
  }
  double sum = 0.0;
  for (const double fraction : fractions) {
    if (!std::isfinite(fraction) || fraction <= 0.0) {
      throw InvalidArgument(fmt::format("partition: a fraction of {} is {}; each must be more than 0 and at most 1.",
                                        device.name, fraction),
                            device.name);
    }
    sum += fraction;
  }
  if (sum > 1.0 + rounding) {
    throw InvalidArgument(
        fmt::format("partition: the fractions of {} sum to {:.6g}; together they may be at most 1.", device.name, sum),
        device.name);
  }
}

}  // namespace

std::vector<Device> Backend::partition(const Device& device, std::span<const double>) const {
  throw Unavailable(fmt::format("partition: {} has no parts. GPUs can be split, by the SMs they have.", device.name),
                    device.name);
}

void Backend::release_partitions(const Device&, std::chrono::nanoseconds) const {}

std::vector<Device> partition(std::string_view device, std::span<const double> fractions) {
  const Device whole = find_device(device);
  require_fractions(whole, fractions);
  return backend_of(whole).partition(whole, fractions);
}

std::vector<Device> partition(std::string_view device, std::initializer_list<double> fractions) {
  return partition(device, std::span<const double>(fractions.begin(), fractions.size()));
}

void release_partitions(std::string_view device, std::chrono::nanoseconds timeout) {
  const Device whole = find_device(device);
  backend_of(whole).release_partitions(whole, timeout);
}

}  // namespace paceline
