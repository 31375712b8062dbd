// SPDX-License-Identifier: Apache-2.0
#include "partitions.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "green_context.hpp"

namespace paceline::cuda {
namespace {

struct Part {
  Device device;
  std::shared_ptr<GreenContext> context;
};

struct Split {
  std::vector<int> groups;  ///< number of SM groups per part; part k follows part k - 1
  bool are_spaces = false;  ///< parts_are_spaces() when it was made
  std::vector<Part> parts;
};

struct Splits {
  std::mutex mutex;
  std::map<int, Split> of_gpu;
};

Splits& splits() {
  static auto* const all = new Splits;  // never destroyed: CUDA must not be used at exit
  return *all;
}

std::vector<Device> devices_of(const Split& split) {
  std::vector<Device> devices;
  for (const Part& part : split.parts) devices.push_back(part.device);
  return devices;
}

Part make_part(const Device& gpu, std::size_t index, double fraction, std::span<CUdevResource> groups) {
  Part part{gpu, std::make_shared<GreenContext>(gpu.index, groups)};
  part.device.part = static_cast<std::int32_t>(index);
  part.device.name = fmt::format("{}/{}", gpu.name, index);
  if (parts_are_spaces()) part.device.memory_space = part.device.name;
  part.device.sm_count = part.context->sm_count();
  part.device.fraction = fraction;
  part.device.device_class = fmt::format("{}, a part of {}", gpu.device_class, part.device.sm_count);
  return part;
}

Split make_split(const Device& gpu, std::span<const double> fractions, std::span<CUdevResource> groups,
                 const std::vector<int>& dealt) {
  Split made{dealt, parts_are_spaces(), {}};
  std::size_t next = 0;
  for (std::size_t k = 0; k < dealt.size(); ++k) {
    const auto count = static_cast<std::size_t>(dealt[k]);
    made.parts.push_back(make_part(gpu, k, fractions[k], groups.subspan(next, count)));
    next += count;
  }
  return made;
}

void require_unused(const Device& gpu, const Split& split, const char* call) {
  std::vector<std::string> used;
  std::vector<int> sms;
  for (const Part& part : split.parts) {
    sms.push_back(part.device.sm_count);
    if (part.context.use_count() > 1) used.push_back(part.device.name);
  }
  if (used.empty()) return;
  throw InvalidArgument(
      fmt::format("{}: {} is split into parts of {} SMs, and {} still in use. Close or drop the "
                  "trainers, streams and buffers there first.",
                  call, gpu.name, fmt::join(sms, ", "),
                  used.size() == 1 ? used.front() + " is" : fmt::format("{} are", fmt::join(used, ", "))),
      used.front());
}

/// The name of a part whose dropped streams still have work; empty: the GPU is whole. Requires: the lock is held.
std::string end_if_idle(const Device& gpu, const char* call) {
  const auto found = splits().of_gpu.find(gpu.index);
  if (found == splits().of_gpu.end()) return {};
  require_unused(gpu, found->second, call);
  for (const Part& part : found->second.parts) {
    if (!part.context->idle()) return part.device.name;
  }
  splits().of_gpu.erase(found);
  return {};
}

/// Repeats `attempt` under the lock until it names no part with work. The lock is free in between, so that other
/// threads go on, and no thread waits for an interpreter's lock while it holds this one.
template <class Attempt>
void until_idle(std::chrono::nanoseconds timeout, const char* call, Attempt attempt) {
  const auto begin = std::chrono::steady_clock::now();
  std::optional<BlockingRegion> region;
  for (;;) {
    std::string busy;
    {
      const std::lock_guard lock(splits().mutex);
      busy = attempt();
    }
    if (busy.empty()) return;
    if (std::chrono::steady_clock::now() - begin > timeout) {
      throw Timeout(fmt::format("{}: work that was enqueued on {} does not come to its end; the part stays. Does a "
                                "kernel wait for something?",
                                call, busy),
                    busy);
    }
    if (!region) region.emplace();
    region->poll();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

std::vector<CUdevResource> groups_of(const Device& gpu) {
  std::vector<CUdevResource> groups;
  try {
    groups = split_sms(gpu.index);
  } catch (const Unavailable& error) {
    throw Unavailable(fmt::format("partition: {} cannot be split: {}", gpu.name, error.what()), gpu.name);
  }
  if (groups.empty()) {
    throw Unavailable(
        fmt::format("partition: {} cannot be split: CUDA makes no groups of its {} SMs", gpu.name, gpu.sm_count),
        gpu.name);
  }
  return groups;
}

// A computed fraction, such as 3 * 0.1, may miss a whole number of groups by a rounding error.
constexpr double kRounding = 1e-6;

void require_a_group(double fraction, int group_count, std::string_view gpu) {
  if (fraction * group_count >= 1.0 - kRounding) return;
  const double smallest = std::ceil(1e4 / group_count) / 1e4;  // rounded up, so that the printed value is accepted
  throw InvalidArgument(
      fmt::format(
          "partition: {:.4g} of {} is less than the smallest group of SMs that CUDA makes there, of which it has "
          "{}: the smallest possible fraction is {:.4f}.",
          fraction, gpu, group_count, smallest),
      std::string(gpu));
}

}  // namespace

bool parts_are_spaces() {
  const char* const value = std::getenv("PACELINE_PARTS_AS_GPUS");
  return value != nullptr && std::string_view(value) == "1";
}

std::vector<int> deal_groups(std::span<const double> fractions, int group_count, std::string_view gpu) {
  std::vector<int> groups;
  std::vector<double> lost;
  double wanted = kRounding;
  for (const double fraction : fractions) {
    require_a_group(fraction, group_count, gpu);
    const double exact = fraction * group_count;
    groups.push_back(static_cast<int>(std::floor(exact + kRounding)));
    lost.push_back(exact - groups.back());
    wanted += exact;
  }
  int left = static_cast<int>(std::floor(wanted)) - std::accumulate(groups.begin(), groups.end(), 0);

  std::vector<std::size_t> order(fractions.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return lost[a] != lost[b] ? lost[a] > lost[b] : fractions[a] > fractions[b];  // keeps equal fractions together
  });
  for (auto alike = order.begin(); alike != order.end();) {
    const auto end = std::find_if(alike, order.end(), [&](std::size_t i) { return fractions[i] != fractions[*alike]; });
    const auto count = static_cast<int>(end - alike);
    if (count > left) break;
    for (; alike != end; ++alike) ++groups[*alike];
    left -= count;
  }
  return groups;
}

std::vector<Device> split(const Device& gpu, std::span<const double> fractions) {
  std::vector<CUdevResource> groups = groups_of(gpu);
  const std::vector<int> dealt = deal_groups(fractions, static_cast<int>(groups.size()), gpu.name);
  std::vector<Device> devices;
  until_idle(std::chrono::seconds(10), "partition", [&]() -> std::string {
    const auto known = splits().of_gpu.find(gpu.index);
    const bool is_known = known != splits().of_gpu.end();
    if (!is_known || known->second.groups != dealt || known->second.are_spaces != parts_are_spaces()) {
      if (std::string busy = end_if_idle(gpu, "partition"); !busy.empty()) return busy;
      splits().of_gpu.emplace(gpu.index, make_split(gpu, fractions, groups, dealt));
    }
    devices = devices_of(splits().of_gpu.at(gpu.index));
    return {};
  });
  return devices;
}

std::vector<Device> parts_of(const Device& gpu) {
  const std::lock_guard lock(splits().mutex);
  const auto found = splits().of_gpu.find(gpu.index);
  return found == splits().of_gpu.end() ? std::vector<Device>{} : devices_of(found->second);
}

std::shared_ptr<GreenContext> context_of(const Device& part) {
  const std::lock_guard lock(splits().mutex);
  const auto found = splits().of_gpu.find(part.index);
  if (found != splits().of_gpu.end()) {
    for (const Part& known : found->second.parts) {
      if (known.device.part == part.part && known.device.sm_count == part.sm_count) return known.context;
    }
  }
  throw InvalidArgument(
      fmt::format("{} of {} SMs is no more: cuda:{} has been {} since. Call partition() again, and use "
                  "the devices that it returns.",
                  part.name, part.sm_count, part.index,
                  found == splits().of_gpu.end() ? "made whole" : "split otherwise"),
      part.name);
}

void end_split(const Device& gpu, std::chrono::nanoseconds timeout) {
  until_idle(timeout, "release_partitions", [&] { return end_if_idle(gpu, "release_partitions"); });
}

}  // namespace paceline::cuda
