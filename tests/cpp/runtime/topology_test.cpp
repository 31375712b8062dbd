// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

#include <paceline/error.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/host_topology.hpp>
#include <paceline/runtime/system_info.hpp>

#include "runtime/text_file.hpp"

#include "errors.hpp"
#include "made_up_system.hpp"

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

TEST(CgroupLimit, IsAbsentWithoutAnyCgroup) { EXPECT_EQ(FakeTopology{}.limit(), std::nullopt); }

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

TEST(CgroupLimit, OfAParentCountsWhenItIsTighter) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/a/b/c\n");
  system.file("sys/fs/cgroup/a/b/c/cpu.max", "800000 100000\n");
  system.file("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  system.file("sys/fs/cgroup/a/cpu.max", "300000 100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 3);
}

TEST(CgroupLimit, OfTheMountPointCountsInsideACgroupNamespace) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", "50000 100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 1);
}

TEST(CgroupLimit, MaxMeansNone) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/\n").file("sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(system.limit(), std::nullopt);
}

TEST(CgroupLimit, ReadsVersionOneWithItsParents) {
  FakeTopology system;
  system.file("proc/self/cgroup", "5:memory:/other\n4:cpu,cpuacct:/slurm/job_7\n");
  system.file("sys/fs/cgroup/cpu/slurm/job_7/cpu.cfs_quota_us", "-1\n");
  system.file("sys/fs/cgroup/cpu/slurm/job_7/cpu.cfs_period_us", "100000\n");
  system.file("sys/fs/cgroup/cpu/slurm/cpu.cfs_quota_us", "400000\n");
  system.file("sys/fs/cgroup/cpu/slurm/cpu.cfs_period_us", "100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 4);
}

TEST(CgroupLimit, FindsAContainersOwnGroupWhereOnlyItsSubtreeIsMounted) {
  FakeTopology system;
  system.file("proc/self/cgroup", "4:cpu:/docker/abc\n");
  system.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n").file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 2);
}

TEST(CgroupLimit, FindsASubgroupWhereOnlyTheContainersSubtreeIsMounted) {
  FakeTopology system;
  system.file("proc/self/cgroup", "4:cpu:/docker/abc/job\n0::/docker/abc/job/part\n");
  system.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "800000\n").file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  system.file("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000\n");
  system.file("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 3);
  system.file("sys/fs/cgroup/job/part/cpu.max", "max 100000\n").file("sys/fs/cgroup/job/cpu.max", "200000 100000\n");
  EXPECT_EQ(system.limit()->worker_count(), 2);
}

TEST(CgroupLimit, IsNotThatOfAnotherGroupOfTheSameNameFurtherUp) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/user/job\n").file("sys/fs/cgroup/job/cpu.max", "100000 100000\n");
  system.file("sys/fs/cgroup/user/job/cpu.max", "500000 100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 5);
}

TEST(CgroupLimit, FallsBackToTheMountPointForAGroupThatIsNotVisible) {
  for (const char* group : {"0::/elsewhere/x\n", "0::/../outside\n", "0::/podman/abcdef\n"}) {
    FakeTopology system;
    system.file("proc/self/cgroup", group);
    system.file("sys/fs/cgroup/cpu.max", "700000 100000\n");
    ASSERT_TRUE(system.limit().has_value()) << group;
    EXPECT_EQ(system.limit()->worker_count(), 7);
  }
}

TEST(CgroupLimit, TakesTheTighterOfBothOnAHybridSystem) {
  FakeTopology system;
  system.file("proc/self/cgroup", "3:cpuset:/q\n1:cpu:/\n0::/s\n");
  system.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "600000\n").file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 6);
  system.file("sys/fs/cgroup/unified/s/cpu.max", "250000 100000\n");
  EXPECT_EQ(system.limit()->worker_count(), 3);
}

TEST(CgroupLimit, ReadsGroupsWithOddCharacters) {
  FakeTopology system;
  system.file("proc/self/cgroup", "0::/a:b c\n");
  system.file("sys/fs/cgroup/a:b c/cpu.max", "100000 100000\n");
  ASSERT_TRUE(system.limit().has_value());
  EXPECT_EQ(system.limit()->worker_count(), 1);
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

}  // namespace
}  // namespace paceline
