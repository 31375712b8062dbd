// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/host_topology.hpp>

#include <algorithm>
#include <cerrno>
#include <map>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

#include "runtime/text_file.hpp"

namespace paceline {
namespace {

using internal::parse_integer;
using internal::read_text_file;
using internal::split;
using internal::trim;
namespace fs = std::filesystem;

// A larger index means a malformed file.
constexpr int kMaxCoreIndex = 1 << 20;

// --- cgroups ---------------------------------------------------------------------------------------------------

bool lists(std::string_view comma_separated, std::string_view word) {
  const auto words = split(comma_separated, ',');
  return std::find(words.begin(), words.end(), word) != words.end();
}

// The path of our group in the v2 hierarchy, or in that of v1's cpu controller.
std::optional<std::string> read_cgroup_path(const fs::path& root, bool v2) {
  const auto text = read_text_file(root / "proc/self/cgroup");
  if (!text) return std::nullopt;
  for (const std::string_view line : split(*text, '\n')) {
    const std::size_t first = line.find(':');
    if (first == std::string_view::npos) continue;
    const std::size_t second = line.find(':', first + 1);  // the path may hold further colons
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool matches = v2 ? line.substr(0, first) == "0" && controllers.empty() : lists(controllers, "cpu");
    if (matches) return std::string(line.substr(second + 1));
  }
  return std::nullopt;
}

/// Where the group is below the mount point. A container may see only a subtree of the groups, at the mount point,
/// while /proc names a path of the host. Then the group has the rest of that path. If no part of the path is visible,
/// returns all of it; a search upwards from there ends at the mount point.
fs::path visible_path(const fs::path& mount_point, const std::string& group) {
  const fs::path whole = fs::path(group).relative_path();
  for (auto first = whole.begin(); first != whole.end(); ++first) {
    fs::path rest;
    for (auto name = first; name != whole.end(); ++name) rest /= *name;
    std::error_code error;
    if (fs::is_directory(mount_point / rest, error)) return rest;
  }
  return whole;
}

std::optional<CpuLimit> read_group_limit(const fs::path& directory, bool v2) {
  const fs::path source = directory / (v2 ? "cpu.max" : "cpu.cfs_quota_us");
  std::string text = read_text_file(source).value_or("");  // v2: "max 100000" or "150000 100000"; v1: "-1" or "150000"
  if (!v2) text.append(" ").append(read_text_file(directory / "cpu.cfs_period_us").value_or(""));
  std::replace(text.begin(), text.end(), '\n', ' ');
  const auto words = split(text, ' ');
  if (words.size() != 2) return std::nullopt;
  const auto quota = parse_integer(words[0]);
  const auto period = parse_integer(words[1]);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return CpuLimit{*quota, *period, source.string()};
}

// --- cores -----------------------------------------------------------------------------------------------------

std::map<int, int> read_numa_nodes(const fs::path& root) {
  std::map<int, int> node_of_core;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root / "sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node")) continue;
    const auto node = parse_integer<int>(std::string_view(name).substr(4));
    const auto text = read_text_file(entry.path() / "cpulist");
    if (!node || !text) continue;
    for (const int core : parse_cpu_list(*text).value_or(std::vector<int>{})) node_of_core[core] = *node;
  }
  return node_of_core;
}

std::vector<HostCore> read_cores(const fs::path& root, std::vector<int> affinity) {
  std::sort(affinity.begin(), affinity.end());
  affinity.erase(std::unique(affinity.begin(), affinity.end()), affinity.end());
  const auto node_of_core = read_numa_nodes(root);
  std::map<int, int> used_siblings;
  std::vector<HostCore> cores;
  for (const int index : affinity) {
    HostCore core{.index = index, .physical_core = index};
    if (const auto node = node_of_core.find(index); node != node_of_core.end()) core.numa_node = node->second;
    const auto text = read_text_file(root / "sys/devices/system/cpu" / ("cpu" + std::to_string(index)) /
                                     "topology/thread_siblings_list");
    const auto siblings = text ? parse_cpu_list(*text) : std::nullopt;
    if (siblings && std::binary_search(siblings->begin(), siblings->end(), index)) {
      core.physical_core = siblings->front();
    }
    core.sibling_rank = used_siblings[core.physical_core]++;
    const auto package = read_text_file(root / "sys/devices/system/cpu" / ("cpu" + std::to_string(index)) /
                                        "topology/physical_package_id");
    if (package) core.socket = parse_integer<int>(trim(*package)).value_or(-1);
    cores.push_back(core);
  }
  return cores;
}

}  // namespace

std::optional<CpuLimit> read_cpu_limit(const fs::path& root) {
  struct Hierarchy {
    const char* mount_point;
    bool v2;
  };
  // Where systemd and container runtimes mount them: v2, v2 of a hybrid system, v1.
  constexpr Hierarchy hierarchies[] = {
      {"sys/fs/cgroup", true}, {"sys/fs/cgroup/unified", true}, {"sys/fs/cgroup/cpu", false}};
  std::optional<CpuLimit> tightest;
  for (const auto& [mount_point, v2] : hierarchies) {
    const auto group = read_cgroup_path(root, v2);
    if (!group) continue;
    for (fs::path below = visible_path(root / mount_point, *group);; below = below.parent_path()) {
      const auto limit = read_group_limit(below.empty() ? root / mount_point : root / mount_point / below, v2);
      if (limit && (!tightest || limit->cores() < tightest->cores())) tightest = limit;
      if (below.empty()) break;
    }
  }
  return tightest;
}

std::optional<std::vector<int>> parse_cpu_list(std::string_view text) {
  std::vector<int> cores;
  for (const std::string_view piece : split(trim(text), ',')) {
    const std::size_t dash = piece.find('-');
    const auto first = parse_integer<int>(piece.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_integer<int>(piece.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMaxCoreIndex) return std::nullopt;
    for (int core = *first; core <= *last; ++core) cores.push_back(core);
  }
  std::sort(cores.begin(), cores.end());
  cores.erase(std::unique(cores.begin(), cores.end()), cores.end());
  return cores;
}

std::vector<int> affinity_mask() {
  std::vector<int> cores;
#if defined(__linux__)
  // The kernel refuses a set smaller than its own (EINVAL), and cpu_set_t ends at 1024. So grow the set until it fits.
  for (int capacity = 1024; capacity <= kMaxCoreIndex; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(capacity));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(capacity));
    CPU_ZERO_S(bytes, set);
    const bool read = sched_getaffinity(getpid(), bytes, set) == 0;
    const bool too_small = !read && errno == EINVAL;
    for (int core = 0; read && core < capacity; ++core) {
      if (CPU_ISSET_S(static_cast<std::size_t>(core), bytes, set)) cores.push_back(core);
    }
    CPU_FREE(set);
    if (!too_small) break;
  }
#endif
  return cores;
}

HostTopology read_host_topology(const fs::path& root, std::vector<int> affinity) {
  HostTopology topology;
  topology.cores = read_cores(root, std::move(affinity));
  topology.cpu_limit = read_cpu_limit(root);
  topology.device_count = topology.cores.empty() ? std::max<std::int64_t>(1, std::thread::hardware_concurrency())
                                                 : static_cast<std::int64_t>(topology.cores.size());
  if (topology.cpu_limit) {
    topology.device_count = std::min(topology.device_count, topology.cpu_limit->worker_count());
  }
  return topology;
}

HostTopology read_host_topology() { return read_host_topology("/", affinity_mask()); }

std::vector<Device> on_one_socket(std::vector<Device> devices, const HostTopology& topology) {
  const auto is_gpu = [](const Device& device) { return device.kind == DeviceKind::cuda; };
  std::map<int, int> socket_of_node;
  std::map<int, std::vector<int>> cores_of_socket;
  for (const HostCore& core : topology.cores) {
    const int socket = core.socket >= 0 ? core.socket : core.numa_node;
    if (socket < 0) continue;
    if (core.numa_node >= 0) socket_of_node.emplace(core.numa_node, socket);
    cores_of_socket[socket].push_back(core.index);
  }
  std::vector<std::pair<int, std::size_t>> found;  // sockets and their GPUs, in the order of the devices
  for (const Device& device : devices) {
    const auto socket = socket_of_node.find(device.numa_node);
    if (!is_gpu(device) || socket == socket_of_node.end()) continue;
    const auto known = std::ranges::find(found, socket->second, &std::pair<int, std::size_t>::first);
    if (known == found.end()) {
      found.emplace_back(socket->second, 1);
    } else {
      ++known->second;
    }
  }
  if (found.size() < 2) return devices;
  const auto most = std::ranges::max_element(found, {}, &std::pair<int, std::size_t>::second);  // the first of equals
  const std::vector<int>& cores = cores_of_socket[most->first];
  if (cores.size() < static_cast<std::size_t>(std::ranges::count_if(devices, is_gpu))) return devices;
  for (Device& device : devices) {
    if (is_gpu(device)) device.cores = cores;
  }
  return devices;
}

Device host_device(const HostTopology& topology, std::int32_t index) {
  Device device;
  device.index = index;
  device.name = "host:" + std::to_string(index);
  device.memory_space = "host";
  device.device_class = "host";
  const auto place = static_cast<std::size_t>(index % topology.device_count);
  const auto device_count = static_cast<std::size_t>(topology.device_count);
  std::vector<HostCore> cores = topology.cores;
  const bool core_each = device_count >= cores.size();
  std::sort(cores.begin(), cores.end(), [core_each](const HostCore& a, const HostCore& b) {
    if (core_each) {
      return std::tie(a.sibling_rank, a.numa_node, a.index) < std::tie(b.sibling_rank, b.numa_node, b.index);
    }
    return std::tie(a.numa_node, a.physical_core, a.index) < std::tie(b.numa_node, b.physical_core, b.index);
  });
  const std::size_t begin = place * cores.size() / device_count;
  const std::size_t end = (place + 1) * cores.size() / device_count;
  for (std::size_t i = begin; i < end; ++i) {
    device.cores.push_back(cores[i].index);
    device.numa_node = i == begin || device.numa_node == cores[i].numa_node ? cores[i].numa_node : -1;
  }
  std::sort(device.cores.begin(), device.cores.end());
  return device;
}

}  // namespace paceline
