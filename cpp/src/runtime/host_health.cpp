// SPDX-License-Identifier: Apache-2.0
#include "runtime/host_health.hpp"

#include <algorithm>
#include <string>
#include <system_error>

#include <paceline/runtime/host_topology.hpp>

#include "runtime/text_file.hpp"

namespace paceline::internal {
namespace {

namespace fs = std::filesystem;

std::optional<double> read_clock(const fs::path& directory, const char* file) {
  const auto text = read_text_file(directory / file);
  const auto kilohertz = text ? parse_integer(trim(*text)) : std::nullopt;
  if (!kilohertz || *kilohertz <= 0) return std::nullopt;
  return 1e3 * static_cast<double>(*kilohertz);
}

/// Sets the mean clocks of the cores, if every core's clock is known.
void read_clocks(const fs::path& root, const std::vector<int>& cores, DeviceHealth& health) {
  double now = 0.0;
  double most = 0.0;
  for (const int core : cores) {
    const fs::path directory = root / "sys/devices/system/cpu" / ("cpu" + std::to_string(core)) / "cpufreq";
    const auto clock = read_clock(directory, "scaling_cur_freq");
    const auto max_clock = read_clock(directory, "cpuinfo_max_freq");
    if (!clock || !max_clock) return;
    now += *clock;
    most += *max_clock;
  }
  if (cores.empty()) return;
  health.clock_hz = now / static_cast<double>(cores.size());
  health.max_clock_hz = most / static_cast<double>(cores.size());
}

/// The cores that a thread may run on, from its `status` file; nothing if the file does not tell.
std::optional<std::vector<int>> allowed_cores(std::string_view thread_status) {
  constexpr std::string_view key = "Cpus_allowed_list:";
  for (const std::string_view line : split(thread_status, '\n')) {
    if (line.starts_with(key)) return parse_cpu_list(line.substr(key.size()));
  }
  return std::nullopt;
}

}  // namespace

std::map<int, CoreTicks> parse_core_ticks(std::string_view proc_stat) {
  std::map<int, CoreTicks> cores;
  for (const std::string_view line : split(proc_stat, '\n')) {
    const auto fields = split(line, ' ');
    // the fields: cpu0 user nice system idle iowait irq softirq steal ...; user and nice include guests' time
    if (fields.size() < 9 || !fields[0].starts_with("cpu")) continue;
    const auto core = parse_integer<int>(fields[0].substr(3));
    std::optional<std::int64_t> ticks[8];
    bool sound = core.has_value();
    for (std::size_t i = 0; i < 8; ++i) sound = (ticks[i] = parse_integer(fields[i + 1])).has_value() && sound;
    if (sound) cores[*core] = {*ticks[0] + *ticks[1] + *ticks[2] + *ticks[5] + *ticks[6], *ticks[7]};
  }
  return cores;
}

std::optional<std::int64_t> parse_task_ticks(std::string_view stat) {
  // The name in parentheses may itself hold spaces and parentheses. utime is the 12th field after it.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string_view::npos) return std::nullopt;
  const auto fields = split(stat.substr(name_end + 1), ' ');
  if (fields.size() < 13) return std::nullopt;
  const auto user = parse_integer(fields[11]);
  const auto system = parse_integer(fields[12]);
  if (!user || !system) return std::nullopt;
  return *user + *system;
}

std::optional<QuotaPeriods> parse_quota_periods(std::string_view cpu_stat) {
  std::optional<std::int64_t> total;
  std::optional<std::int64_t> throttled;
  for (const std::string_view line : split(cpu_stat, '\n')) {
    const auto words = split(line, ' ');
    if (words.size() != 2) continue;
    if (words[0] == "nr_periods") total = parse_integer(words[1]);
    if (words[0] == "nr_throttled") throttled = parse_integer(words[1]);
  }
  if (!total || !throttled) return std::nullopt;
  return QuotaPeriods{*total, *throttled};
}

HostCounters::HostCounters(const fs::path& root, std::int64_t ticks_per_second)
    : root_(root), when_(std::chrono::steady_clock::now()), ticks_per_second_(ticks_per_second) {
  if (const auto stat = read_text_file(root / "proc/stat")) cores_ = parse_core_ticks(*stat);
  const auto process = read_text_file(root / "proc/self/stat");
  own_ticks_ = process ? parse_task_ticks(*process) : std::nullopt;
  std::error_code error;
  // Threads may end while this reads, so files may be missing.
  for (fs::directory_iterator thread(root / "proc/self/task", error), end; own_ticks_ && !error && thread != end;
       thread.increment(error)) {
    const auto status = read_text_file(thread->path() / "status");
    auto allowed = status ? allowed_cores(*status) : std::nullopt;
    if (!allowed) continue;
    const auto stat = read_text_file(thread->path() / "stat");
    threads_.push_back({*std::move(allowed), (stat ? parse_task_ticks(*stat) : std::nullopt).value_or(0)});
  }
  if (const auto limit = read_cpu_limit(root)) {
    const auto text = read_text_file(fs::path(limit->source).parent_path() / "cpu.stat");
    if (text) quota_ = parse_quota_periods(*text);
  }
}

/// The most CPU time that this process may have spent on `cores`: all its time, ended threads included, minus that of
/// threads pinned elsewhere. An upper bound, so that our own work is never blamed on others.
std::int64_t HostCounters::own_ticks(const std::vector<int>& cores) const {
  std::int64_t ticks = own_ticks_.value_or(0);
  for (const Thread& thread : threads_) {
    const bool may_run_here = std::any_of(cores.begin(), cores.end(), [&](int core) {
      return std::binary_search(thread.allowed.begin(), thread.allowed.end(), core);
    });
    if (!may_run_here) ticks -= thread.ticks;
  }
  return ticks;
}

std::optional<CoreTimes> HostCounters::times_of(const std::vector<int>& cores) const {
  if (!own_ticks_ || cores.empty() || ticks_per_second_ < 1) return std::nullopt;
  CoreTicks sum;
  for (const int core : cores) {
    const auto found = cores_.find(core);
    if (found == cores_.end()) return std::nullopt;
    sum.busy += found->second.busy;
    sum.stolen += found->second.stolen;
  }
  const std::chrono::nanoseconds tick(1'000'000'000 / ticks_per_second_);
  return CoreTimes{.core_count = static_cast<std::int64_t>(cores.size()),
                   .busy = sum.busy * tick,
                   .ours = own_ticks(cores) * tick,
                   .stolen = sum.stolen * tick};
}

DeviceHealth HostCounters::health_of(const std::vector<int>& cores) const {
  DeviceHealth health;
  health.when = when_;
  read_clocks(root_, cores, health);
  health.cores = times_of(cores);
  health.quota = quota_;
  return health;
}

}  // namespace paceline::internal
