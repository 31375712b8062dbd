// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <unistd.h>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/host_topology.hpp>
#include <paceline/runtime/system_info.hpp>

#include "errors.hpp"
#include "made_up_system.hpp"
#include "runtime/text_file.hpp"

namespace paceline {
namespace {

namespace fs = std::filesystem;

class FakeTopology : public MadeUpSystem {
 public:
  [[nodiscard]] std::optional<CpuLimit> limit() const { return read_cpu_limit(root); }
  [[nodiscard]] HostTopology topology(std::vector<int> affinity) const { return read_host_topology(root, affinity); }
};

using Cores = std::vector<int>;

TEST(TextFile, IsNothingWhereReadingFails) {
  EXPECT_EQ(internal::read_text_file("/proc/self/no_such_file"), std::nullopt);
  // It opens but cannot be read, like a file of /proc whose thread has ended.
  EXPECT_EQ(internal::read_text_file("/proc/self"), std::nullopt);
}

TEST(TextFile, IsReadToItsEnd) {
  const fs::path path = fs::temp_directory_path() / ("paceline_text_" + std::to_string(::getpid()));
  for (const std::size_t size : {0, 1, 4095, 4096, 4097, 20'000}) {
    const std::string text(size, 'x');
    std::ofstream(path) << text;
    EXPECT_EQ(internal::read_text_file(path), text) << size;
  }
  fs::remove(path);
}

TEST(CpuList, ReadsRangesAndSingleCores) {
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11\n"), (Cores{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("5"), Cores{5});
  EXPECT_EQ(parse_cpu_list("3,1-3"), (Cores{1, 2, 3}));
  EXPECT_EQ(parse_cpu_list("\n"), Cores{});  // a NUMA node without cores
}

TEST(CpuList, RefusesWhatIsMalformedAsAWhole) {
  for (const char* text : {"0-", "-3", "a", "0-2x", "3-1", "0,,x", "0-99999999", "1 2", "0x3"}) {
    EXPECT_EQ(parse_cpu_list(text), std::nullopt) << text;
  }
}

TEST(CgroupLimit, ReadsVersionTwoOfTheOwnGroup) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/user.slice/job.scope\n");
  system.file("sys/fs/cgroup/user.slice/job.scope/cpu.max", "150000 100000\n");
  const auto limit = system.limit();
  ASSERT_TRUE(limit.has_value());
  EXPECT_DOUBLE_EQ(limit->cores(), 1.5);
  EXPECT_EQ(limit->worker_count(), 2);
  EXPECT_TRUE(limit->source.ends_with("/user.slice/job.scope/cpu.max")) << limit->source;
}

TEST(CgroupLimit, IsTheTightestOfAllGroupsThatCount) {
  struct Case {
    const char* what;
    const char* groups;                              ///< of the process
    std::vector<std::pair<const char*, int>> files;  ///< with a limit in tenths of a core; 0 stands for none
    int workers;                                     ///< 0: there is no limit
  };
  const Case cases[] = {
      {"no cgroup", "", {}, 0},
      {"max", "0::/\n", {{"", 0}}, 0},
      {"a parent that is tighter", "0::/a/b/c\n", {{"a/b/c", 80}, {"a/b", 0}, {"a", 30}}, 3},
      {"the mount point inside a namespace", "0::/\n", {{"", 5}}, 1},
      {"a parent of version one", "5:memory:/other\n4:cpu,cpuacct:/q/j\n", {{"cpu/q/j", 0}, {"cpu/q", 40}}, 4},
      {"a container whose subtree alone is mounted", "4:cpu:/docker/abc\n", {{"cpu", 20}}, 2},
      {"a subgroup of one", "4:cpu:/docker/abc/job\n0::/docker/abc/job/part\n", {{"cpu", 80}, {"cpu/job", 30}}, 3},
      {"one of both versions",
       "4:cpu:/docker/abc/job\n0::/docker/abc/job/part\n",
       {{"cpu", 80}, {"cpu/job", 30}, {"job/part", 0}, {"job", 20}},
       2},
      {"no group of the same name further up", "0::/user/job\n", {{"job", 10}, {"user/job", 50}}, 5},
      {"a group that is not visible", "0::/elsewhere/x\n", {{"", 70}}, 7},
      {"a group outside", "0::/../outside\n", {{"", 70}}, 7},
      {"a group of a container", "0::/podman/abcdef\n", {{"", 70}}, 7},
      {"a hybrid system", "3:cpuset:/q\n1:cpu:/\n0::/s\n", {{"cpu", 60}}, 6},
      {"both of a hybrid system", "3:cpuset:/q\n1:cpu:/\n0::/s\n", {{"cpu", 60}, {"unified/s", 25}}, 3},
      {"odd characters", "0::/a:b c\n", {{"a:b c", 10}}, 1},
  };
  for (const Case& one : cases) {
    FakeTopology system;
    if (*one.groups != '\0') system.file("proc/self/cgroup", one.groups);
    for (const auto& [group, tenths] : one.files) {
      const std::string folder = std::string("sys/fs/cgroup/") + group, limit = std::to_string(10000 * tenths);
      if (std::string_view(group).starts_with("cpu")) {
        system.file(folder + "/cpu.cfs_quota_us", tenths == 0 ? "-1\n" : limit + "\n");
        system.file(folder + "/cpu.cfs_period_us", "100000\n");
      } else {
        system.file(folder + "/cpu.max", (tenths == 0 ? "max" : limit) + " 100000\n");
      }
    }
    const auto limit = system.limit();
    EXPECT_EQ(limit ? limit->worker_count() : 0, one.workers) << one.what;
  }
}

TEST(CgroupLimit, IgnoresFilesThatMakeNoSense) {
  for (const char* text : {"", "max", "abc 100000", "100000", "100000 0", "-1 100000", "0 100000", "1e5 100000",
                           "100000 100000 7", "99999999999999999999 100000"}) {
    FakeTopology system;
    system.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", text);
    EXPECT_EQ(system.limit(), std::nullopt) << text;
  }
  FakeTopology lines;
  lines.file("proc/self/cgroup", "::\n0:\n");
  EXPECT_EQ(lines.limit(), std::nullopt);
}

TEST(HostTopology, CountsTheCoresOfTheMaskWhenNothingElseIsKnown) {
  const HostTopology topology = FakeTopology{}.topology({4, 1, 4, 2000});
  ASSERT_EQ(topology.cores.size(), 3u);
  EXPECT_EQ(topology.cores[0], (HostCore{.index = 1, .physical_core = 1}));
  EXPECT_EQ(topology.cores[2].index, 2000);
  EXPECT_EQ(topology.device_count, 3);
}

TEST(HostTopology, IsLimitedByTheQuotaButNeverBelowOne) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", "1000 100000\n");
  EXPECT_EQ(system.topology({0, 1, 2, 3}).device_count, 1);
  system.file("sys/fs/cgroup/cpu.max", "900000 100000\n");
  EXPECT_EQ(system.topology({0, 1, 2, 3}).device_count, 4);
}

TEST(HostTopology, ReadsNumaNodesAndSiblings) {
  FakeTopology system;
  system.file("sys/devices/system/node/node0/cpulist", "0-1\n").file("sys/devices/system/node/node1/cpulist", "2-3\n");
  system.file("sys/devices/system/node/nodeX/cpulist", "0\n").file("sys/devices/system/node/online", "0-1\n");
  system.file("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n");
  system.file("sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "0,2\n");
  system.file("sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "nonsense\n");
  const HostTopology topology = system.topology({0, 2, 3, 9});
  EXPECT_EQ(topology.cores[0], (HostCore{.index = 0, .numa_node = 0, .physical_core = 0, .sibling_rank = 0}));
  EXPECT_EQ(topology.cores[1], (HostCore{.index = 2, .numa_node = 1, .physical_core = 0, .sibling_rank = 1}));
  EXPECT_EQ(topology.cores[2], (HostCore{.index = 3, .numa_node = 1, .physical_core = 3, .sibling_rank = 0}));
  EXPECT_EQ(topology.cores[3], (HostCore{.index = 9, .numa_node = -1, .physical_core = 9, .sibling_rank = 0}));
}

TEST(HostTopology, ReadsSockets) {
  FakeTopology system;
  system.file("sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n");
  system.file("sys/devices/system/cpu/cpu2/topology/physical_package_id", "1\n");
  system.file("sys/devices/system/cpu/cpu3/topology/physical_package_id", "-1\n");
  system.file("sys/devices/system/cpu/cpu4/topology/physical_package_id", "nonsense\n");
  std::vector<int> sockets;
  for (const HostCore& core : system.topology({0, 1, 2, 3, 4}).cores) sockets.push_back(core.socket);
  EXPECT_EQ(sockets, (std::vector<int>{0, -1, 1, -1, -1}));
}

TEST(HostDevice, TakesFirstHyperthreadsFirstWhenThereIsACoreForEach) {
  FakeTopology system;  // hyperthreads are neighbours, as on many virtual machines
  for (int core = 0; core < 4; ++core) {
    system.file("sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list",
                core < 2 ? "0-1\n" : "2-3\n");
  }
  const HostTopology topology = system.topology({0, 1, 2, 3});
  std::vector<Cores> cores;
  for (int i = 0; i < 4; ++i) cores.push_back(host_device(topology, i).cores);
  EXPECT_EQ(cores, (std::vector<Cores>{{0}, {2}, {1}, {3}}));
}

TEST(HostDevice, DealsAllCoresOutInDisjointRunsUnderAQuota) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", "300000 100000\n");
  system.file("sys/devices/system/node/node0/cpulist", "0-7\n");
  const HostTopology topology = system.topology({0, 1, 2, 3, 4, 5, 6, 7});
  ASSERT_EQ(topology.device_count, 3);
  std::multiset<int> seen;
  for (int i = 0; i < 3; ++i) {
    const Device device = host_device(topology, i);
    EXPECT_GE(device.cores.size(), 2u);
    EXPECT_EQ(device.numa_node, 0);
    seen.insert(device.cores.begin(), device.cores.end());
  }
  EXPECT_EQ(seen, (std::multiset<int>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(HostDevice, HasNoNodeWhenItsCoresLieOnSeveral) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", "100000 100000\n");
  system.file("sys/devices/system/node/node0/cpulist", "0\n").file("sys/devices/system/node/node1/cpulist", "1-2\n");
  EXPECT_EQ(host_device(system.topology({0, 1, 2}), 0).numa_node, -1);
  EXPECT_EQ(host_device(system.topology({1, 2}), 0).numa_node, 1);
}

TEST(HostDevice, SharesCoresWhenThereAreMoreDevicesThanCores) {
  const HostTopology topology = FakeTopology{}.topology({3, 5});
  EXPECT_EQ(host_device(topology, 2).cores, Cores{3});
  EXPECT_EQ(host_device(topology, 5).cores, Cores{5});
  EXPECT_EQ(host_device(topology, 5).name, "host:5");
}

TEST(HostDevice, IsNotPinnedWhereThePlatformHasNoMask) {
  const HostTopology topology = FakeTopology{}.topology({});
  EXPECT_GE(topology.device_count, 1);
  EXPECT_TRUE(host_device(topology, 0).cores.empty());
}

/// The host devices of this machine, without its GPUs.
std::vector<Device> host_devices() {
  std::vector<Device> found = devices();
  std::erase_if(found, [](const Device& device) { return device.kind != DeviceKind::host; });
  return found;
}

TEST(Devices, OfTheHostAreDisjointAndInsideTheMask) {
  const std::vector<int> mask = affinity_mask();
  const std::vector<Device> found = host_devices();
  ASSERT_FALSE(found.empty());
  std::set<int> used;
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].name, "host:" + std::to_string(i));
    EXPECT_EQ(found[i].memory_space, "host");
    for (const int core : found[i].cores) {
      EXPECT_TRUE(std::find(mask.begin(), mask.end(), core) != mask.end()) << core;
      EXPECT_TRUE(used.insert(core).second) << "core " << core << " is used twice";
    }
    EXPECT_EQ(find_device(found[i].name), found[i]);
  }
}

TEST(Devices, OfTheHostComeAfterTheGpus) {
  const std::vector<Device> found = devices();
  const std::vector<Device> host = host_devices();
  ASSERT_LE(host.size(), found.size());
  EXPECT_TRUE(std::equal(host.rbegin(), host.rend(), found.rbegin()));
}

TEST(Devices, OfTheHostBeyondTheCoresAreLegalByName) {
  const std::vector<Device> found = host_devices();
  const Device extra = find_device("host:" + std::to_string(found.size() + 1));
  EXPECT_EQ(extra.index, static_cast<int>(found.size()) + 1);
  EXPECT_EQ(extra.cores, found[1 % found.size()].cores);
}

TEST(Devices, ErrorsForUnknownNamesListThoseThatExist) {
  for (const char* name : {"", "host", "host:", "host:-1", "host:01", "host:1x", "host: 1", "HOST:0", "host:99999",
                           "host:99999999999999999999", "gpu:0", "cuda:4096", "cuda:0/7"}) {
    const auto error = thrown_by<InvalidArgument>([&] { (void)find_device(name); });
    EXPECT_TRUE(says(error, "devices of this machine: " + devices().front().name)) << name;
  }
}

TEST(Devices, ErrorsForNamesWithoutANumberSayHowTheyAreNamed) {
  const auto error = thrown_by<InvalidArgument>([&] { (void)find_device("host"); });
  EXPECT_TRUE(says(error, "they have numbers, host:0, host:1"));
}

TEST(SystemInfo, ReadsTheModelOfTheProcessor) {
  FakeTopology system;
  EXPECT_EQ(read_cpu_model(system.root), "");
  system.file("proc/cpuinfo", "processor\t: 0\nmodel\t\t: 207\nmodel name\t: Some CPU @ 2.0GHz : B\n\nprocessor : 1\n");
  EXPECT_EQ(read_cpu_model(system.root), "Some CPU @ 2.0GHz : B");
}

TEST(SystemInfo, SaysHowTheLibraryWasBuilt) {
  const BuildInfo info = build_info();
  EXPECT_NE(info.version.find('.'), std::string::npos);
  EXPECT_NE(info.compiler.find('.'), std::string::npos);
  EXPECT_TRUE(says(info.flags, "C++ 20"));
  EXPECT_NE(info.fmt_version.find('.'), std::string::npos);
}

/// Made-up cores, each with its node and socket, and GPUs near these nodes.
struct Sockets {
  HostTopology topology{};
  std::vector<Device> gpus{};

  Sockets(const std::vector<std::pair<int, int>>& cores, const std::vector<int>& nodes_of_gpus) {
    for (int index = 0; const auto& [node, socket] : cores) {
      topology.cores.push_back({.index = index++, .numa_node = node, .socket = socket});
    }
    for (std::int32_t index = 0; const int node : nodes_of_gpus) {
      Device gpu;
      gpu.kind = DeviceKind::cuda;
      gpu.index = index++;
      gpu.numa_node = node;
      for (const HostCore& core : topology.cores) {
        if (node >= 0 && core.numa_node == node) gpu.cores.push_back(core.index);
      }
      gpus.push_back(gpu);
    }
  }

  /// The cores of each GPU's worker; empty where they are those near the GPU.
  [[nodiscard]] std::vector<Cores> changed() const {
    std::vector<Cores> all;
    const std::vector<Device> after = on_one_socket(gpus, topology);
    for (std::size_t k = 0; k < gpus.size(); ++k) {
      all.push_back(after[k].cores == gpus[k].cores ? Cores{} : after[k].cores);
      Device same = after[k];
      same.cores = gpus[k].cores;
      EXPECT_EQ(same, gpus[k]) << "only cores change";
    }
    return all;
  }
};

const std::vector<std::pair<int, int>> kTwoSockets{{0, 0}, {0, 0}, {0, 0}, {1, 1}, {1, 1}, {1, 1}};

TEST(OneSocket, IsThatOfMostGpus) {
  EXPECT_EQ(Sockets(kTwoSockets, {0, 1, 1}).changed(), (std::vector<Cores>{{3, 4, 5}, {}, {}}));
}

TEST(OneSocket, IsThatOfTheFirstGpuAmongEquals) {
  EXPECT_EQ(Sockets(kTwoSockets, {1, 0}).changed(), (std::vector<Cores>{{}, {3, 4, 5}}));
  EXPECT_EQ(Sockets(kTwoSockets, {0, 1}).changed(), (std::vector<Cores>{{}, {0, 1, 2}}));
}

TEST(OneSocket, HasSeveralNodesWhoseCoresAllServe) {
  const std::vector<std::pair<int, int>> cores{{0, 0}, {1, 0}, {2, 1}, {3, 1}, {3, 1}};
  EXPECT_EQ(Sockets(cores, {2, 3, 0}).changed(), (std::vector<Cores>{{2, 3, 4}, {2, 3, 4}, {2, 3, 4}}));
  EXPECT_EQ(Sockets(cores, {2, 3, 3}).changed(), (std::vector<Cores>(3))) << "they lie on one socket";
}

TEST(OneSocket, IsANodeWhereTheSystemTellsNoSockets) {
  const std::vector<std::pair<int, int>> cores{{0, -1}, {1, -1}, {1, -1}, {1, -1}};
  EXPECT_EQ(Sockets(cores, {0, 1, 1}).changed(), (std::vector<Cores>{{1, 2, 3}, {}, {}}));
}

TEST(OneSocket, ChangesNothingWhereItIsUnknownOrTooSmall) {
  EXPECT_EQ(Sockets(kTwoSockets, {-1, 1}).changed(), (std::vector<Cores>(2)));
  EXPECT_EQ(Sockets({{-1, -1}, {-1, -1}}, {0, 1}).changed(), (std::vector<Cores>(2)));
  EXPECT_EQ(Sockets({}, {0, 1}).changed(), (std::vector<Cores>(2)));
  EXPECT_EQ(Sockets(kTwoSockets, {0, 0, 1, 1}).changed(), (std::vector<Cores>(4))) << "three cores for four workers";
}

TEST(OneSocket, TakesAGpuOfAnUnknownNodeAlongAndLeavesHostDevices) {
  Sockets machine(kTwoSockets, {-1, 1, 0});
  machine.gpus.push_back(host_device(machine.topology, 0));
  EXPECT_EQ(machine.changed(), (std::vector<Cores>{{3, 4, 5}, {}, {3, 4, 5}, {}}));
}

}  // namespace
}  // namespace paceline
