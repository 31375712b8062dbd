// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <ctime>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/runtime/device_health.hpp>

#include "runtime/host_health.hpp"

#include "made_up_system.hpp"

namespace paceline::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using Causes = std::vector<std::string>;

std::size_t at(ClockLimit limit) { return static_cast<std::size_t>(limit); }

DeviceHealth sampled_at(seconds when) {
  DeviceHealth health;
  health.when = std::chrono::steady_clock::time_point(when);
  return health;
}

TEST(Causes, AreNoneWhereNothingIsKnown) {
  EXPECT_EQ(causes_of({}, {}), Causes{});
  EXPECT_EQ(causes_of(sampled_at(seconds(0)), sampled_at(seconds(10))), Causes{});
}

TEST(Causes, NameTheClockItsLimitAndItsPartOfTheTime) {
  DeviceHealth before = sampled_at(seconds(100));
  DeviceHealth after = sampled_at(seconds(110));
  after.clock_hz = 1.2e9;
  after.max_clock_hz = 1.98e9;
  after.power_limit_watts = 350.0;
  before.limited_for[at(ClockLimit::power_cap)] = seconds(40);
  after.limited_for[at(ClockLimit::power_cap)] = seconds(40) + milliseconds(6100);
  EXPECT_EQ(causes_of(before, after),
            Causes{"its clock is at 1.20 of 1.98 GHz because of the power cap of 350 W (61 % of the last 10 s)"});
  after.clock_hz = 1.965e9;  // back to its usual clock
  EXPECT_EQ(causes_of(before, after),
            Causes{"its clock was held down because of the power cap of 350 W (61 % of the last 10 s)"});
  after.limited_for[at(ClockLimit::power_cap)] = seconds(40) + milliseconds(50);
  EXPECT_EQ(causes_of(before, after), Causes{});
}

TEST(Causes, NameLimitsThatAreInForceWithoutACounter) {
  const DeviceHealth before = sampled_at(seconds(100));
  DeviceHealth after = sampled_at(seconds(110));
  after.clock_hz = 0.6e9;
  after.max_clock_hz = 1.98e9;
  after.temperature_celsius = 91.0;
  after.limits.emplace();
  after.limits->set(at(ClockLimit::hardware_slowdown));
  EXPECT_EQ(causes_of(before, after), Causes{"its clock is at 0.60 of 1.98 GHz because of a slowdown by the hardware"});
  after.limits->set(at(ClockLimit::hardware_thermal));
  after.limits->set(at(ClockLimit::sync_boost));
  EXPECT_EQ(causes_of(before, after), Causes{"its clock is at 0.60 of 1.98 GHz because of the slowest GPU of its boost "
                                             "group and overheating at 91 C"});
}

TEST(Causes, DoNotBlameTheLowClockOfADeviceThatHasNothingToDo) {
  const DeviceHealth before = sampled_at(seconds(100));
  DeviceHealth after = sampled_at(seconds(110));
  after.clock_hz = 0.36e9;
  after.max_clock_hz = 1.98e9;
  after.limits.emplace();
  EXPECT_EQ(causes_of(before, after), Causes{"its clock is at 0.36 of 1.98 GHz"});
  after.limits->set(at(ClockLimit::idle));
  EXPECT_EQ(causes_of(before, after), Causes{});
  after.limits.reset();
  after.clock_hz = 1.5e9;  // normal for a processor with all cores busy
  EXPECT_EQ(causes_of(before, after), Causes{});
}

TEST(Causes, NameOtherProcesses) {
  const DeviceHealth before = sampled_at(seconds(100));
  DeviceHealth after = sampled_at(seconds(110));
  after.other_processes = OtherProcesses{.count = 0, .memory_bytes = 0};
  EXPECT_EQ(causes_of(before, after), Causes{});
  after.other_processes = OtherProcesses{.count = 1, .memory_bytes = (std::uint64_t{41} << 30) / 10};
  EXPECT_EQ(causes_of(before, after), Causes{"another process uses it (4.1 GiB)"});
  after.other_processes = OtherProcesses{.count = 2};
  EXPECT_EQ(causes_of(before, after).front(), "2 other processes use it");
}

TEST(Causes, NameWhatTookTheCoresOfAHostDevice) {
  DeviceHealth before = sampled_at(seconds(100));
  DeviceHealth after = sampled_at(seconds(110));
  before.cores = CoreTimes{.core_count = 2, .busy = seconds(50), .ours = seconds(30), .stolen = seconds(1)};
  after.cores = CoreTimes{.core_count = 2, .busy = seconds(68), .ours = seconds(42), .stolen = seconds(3)};
  before.quota = QuotaPeriods{.total = 1000, .throttled = 10};
  after.quota = QuotaPeriods{.total = 1100, .throttled = 35};
  EXPECT_EQ(causes_of(before, after),
            (Causes{"the hypervisor gave 10 % of its cores' time to other machines in the last 10 s",
                    "other processes took 30 % of its cores' time in the last 10 s",
                    "the CPU quota of its cgroup was used up in 25 % of the quota's periods in the last 10 s"}));
  after.cores->ours = seconds(90);  // more than the total: threads that are not pinned count in full
  after.cores->stolen = before.cores->stolen;
  after.quota = before.quota;
  EXPECT_EQ(causes_of(before, after), Causes{});
}

TEST(HostHealth, ParsesTheTimesOfCores) {
  const auto cores = parse_core_ticks(
      "cpu  3000 20 300 9000 40 5 6 70 0 0\n"
      "cpu0 1000 10 100 4500 20 2 3 30 500 0\n"
      "cpu7 2000 10 200 4500 20 3 3 40 0 0\n"
      "cpu8 1 2 3\ncpux 1 2 3 4 5 6 7 8\ncpu9 1 2 3 4 5 six 7 8\n"
      "intr 25776482 0 0 0 0 0 0 0 0 0\nctxt 1\n");
  ASSERT_EQ(cores.size(), 2U);
  EXPECT_EQ(cores.at(0), (CoreTicks{.busy = 1000 + 10 + 100 + 2 + 3, .stolen = 30}));
  EXPECT_EQ(cores.at(7), (CoreTicks{.busy = 2000 + 10 + 200 + 3 + 3, .stolen = 40}));
}

TEST(HostHealth, ParsesTheTimeOfAThreadWhateverItsName) {
  const std::string rest = " S 1 1 1 0 -1 4194560 1 2 3 4 120 34 5 6 20 0 9 0 100\n";
  EXPECT_EQ(parse_task_ticks("42 (worker)" + rest), 154);
  EXPECT_EQ(parse_task_ticks("42 (a) (c 1 2)" + rest), 154);
  EXPECT_EQ(parse_task_ticks("42 (worker) S 1 1"), std::nullopt);
  EXPECT_EQ(parse_task_ticks(""), std::nullopt);
}

TEST(HostHealth, ParsesThePeriodsOfAQuotaOfBothVersions) {
  const auto v2 = parse_quota_periods(
      "usage_usec 90\nuser_usec 60\nsystem_usec 30\nnr_periods 120\nnr_throttled 12\nthrottled_usec 4711\n");
  ASSERT_TRUE(v2.has_value());
  EXPECT_EQ(v2->total, 120);
  EXPECT_EQ(v2->throttled, 12);
  EXPECT_TRUE(parse_quota_periods("nr_periods 3\nnr_throttled 1\nthrottled_time 99\n").has_value());
  EXPECT_FALSE(parse_quota_periods("usage_usec 90\nuser_usec 60\n").has_value());  // a group without a quota
}

class Proc : public MadeUpSystem {
 public:
  Proc() {
    file("proc/stat", "cpu0 100 0 0 0 0 0 0 7\ncpu1 300 0 0 0 0 0 0 0\ncpu2 50 0 0 0 0 0 0 0\n");
    file("proc/self/stat", "9" + task(90));
    thread(9, "0-2", 20);
  }

  static std::string task(int ticks) {
    return " (python) S 1 1 1 0 -1 4194560 1 2 3 4 " + std::to_string(ticks) + " 0 0 0 20 0 9 0 100\n";
  }
  void thread(int id, const std::string& allowed, int ticks) const {
    const std::string directory = "proc/self/task/" + std::to_string(id) + "/";
    file(directory + "stat", std::to_string(id) + task(ticks));
    file(directory + "status", "Name:\tpython\nCpus_allowed:\tffff\nCpus_allowed_list:\t" + allowed + "\n");
  }
  void clock(int core, const std::string& now, const std::string& most) const {
    const std::string directory = "sys/devices/system/cpu/cpu" + std::to_string(core) + "/cpufreq/";
    file(directory + "scaling_cur_freq", now);
    file(directory + "cpuinfo_max_freq", most);
  }
};

TEST(HostHealth, CountsAsOursWhatIsNotPinnedElsewhere) {
  const Proc system;
  system.thread(10, "0", 40);
  system.thread(11, "1", 25);
  const auto cores = HostCounters(system.root).health_of({0}).cores;
  ASSERT_TRUE(cores.has_value());
  EXPECT_EQ(cores->core_count, 1);
  EXPECT_EQ(cores->busy, milliseconds(1000));
  EXPECT_EQ(cores->stolen, milliseconds(70));
  EXPECT_EQ(cores->ours, milliseconds(900 - 250));
  EXPECT_EQ(HostCounters(system.root).health_of({0, 1}).cores->ours, milliseconds(900));
  EXPECT_EQ(HostCounters(system.root, 1000).health_of({0, 1}).cores->busy, milliseconds(400));
}

TEST(HostHealth, IsUnknownWhereTheSystemDoesNotTell) {
  const Proc system;
  EXPECT_FALSE(HostCounters(system.root).health_of({}).cores.has_value());
  EXPECT_FALSE(HostCounters(system.root).health_of({0, 5}).cores.has_value());
  EXPECT_FALSE(HostCounters(system.root).health_of({0}).quota.has_value());
  EXPECT_FALSE(HostCounters(system.root).health_of({0}).clock_hz.has_value());
  const DeviceHealth nothing = HostCounters(system.root / "nowhere").health_of({0});
  EXPECT_FALSE(nothing.cores.has_value() || nothing.quota.has_value() || nothing.max_clock_hz.has_value());
}

TEST(HostHealth, ReadsTheMeanClockOfItsCores) {
  const Proc system;
  system.clock(0, "1200000\n", "3600000\n");
  system.clock(1, "2400000\n", "4000000\n");
  const DeviceHealth health = HostCounters(system.root).health_of({0, 1});
  EXPECT_DOUBLE_EQ(health.clock_hz.value(), 1.8e9);
  EXPECT_DOUBLE_EQ(health.max_clock_hz.value(), 3.8e9);
  system.clock(1, "<unknown>\n", "4000000\n");
  EXPECT_FALSE(HostCounters(system.root).health_of({0, 1}).clock_hz.has_value());
}

TEST(HostHealth, ReadsTheQuotaThatIsInForce) {
  const Proc system;
  system.file("proc/self/cgroup", "0::/a/b\n");
  system.file("sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
  system.file("sys/fs/cgroup/a/b/cpu.stat", "nr_periods 1\nnr_throttled 0\n");
  system.file("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  system.file("sys/fs/cgroup/a/cpu.stat", "nr_periods 70\nnr_throttled 20\n");
  const auto quota = HostCounters(system.root).health_of({0}).quota;
  ASSERT_TRUE(quota.has_value());
  EXPECT_EQ(quota->total, 70);
  EXPECT_EQ(quota->throttled, 20);
}

/// CPU time of this process: unlike elapsed time, independent of other programs on the machine.
nanoseconds cpu_time() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

TEST(HostHealth, OfThisMachineCountsOurWorkAsOurs) {
  const Device device = devices().back();
  const auto before = health_of(device);
  if (!before.cores) GTEST_SKIP() << "this system does not tell the times of its cores";
  const nanoseconds end = cpu_time() + milliseconds(300);
  while (cpu_time() < end) {
  }
  const auto after = health_of(device);
  ASSERT_TRUE(after.cores.has_value());
  EXPECT_GE(after.cores->ours - before.cores->ours, milliseconds(250));
  EXPECT_GE(after.cores->busy, before.cores->busy);
  EXPECT_GT(after.when, before.when);
}

}  // namespace
}  // namespace paceline::internal
