// SPDX-License-Identifier: Apache-2.0
#include "nvml.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/runtime/blocking.hpp>

#include "runtime/polled_wait.hpp"

namespace paceline::cuda {
namespace {

// The types of NVML that paceline uses, so that a build needs no nvml.h. Values and layouts are those of NVML's binary
// interface, which only grows.
using Gpu = struct NvmlDevice*;
constexpr int kSuccess = 0;
constexpr int kSmClock = 1;
constexpr int kGpuSensor = 0;
constexpr int kUnsignedLongLong = 3;

struct FieldValue {
  std::uint32_t field;
  std::uint32_t scope;
  std::int64_t timestamp;
  std::int64_t latency;
  int type;
  int status;
  std::uint64_t value;  // a union; the fields asked here only use this member
};
static_assert(sizeof(FieldValue) == 40);

struct Process {
  std::uint32_t number;
  std::uint64_t used_memory;
  std::uint32_t gpu_instance;
  std::uint32_t compute_instance;
};
static_assert(sizeof(Process) == 24);

/// Fields with the times under a limit, in nanoseconds. These numbers mean the same for every driver since 535. The
/// numbers for the hardware's own slowdowns changed with 575 and again before 580.82, so those are only reported while
/// in force.
constexpr std::array<std::pair<std::uint32_t, ClockLimit>, 3> kTimes{
    {{74, ClockLimit::power_cap}, {75, ClockLimit::software_thermal}, {76, ClockLimit::sync_boost}}};

// ClockLimit is in the order of NVML's bits, from 0x1 to 0x100.
static_assert(static_cast<int>(ClockLimit::idle) == 0 && static_cast<int>(ClockLimit::power_cap) == 2 &&
              static_cast<int>(ClockLimit::software_thermal) == 5 &&
              static_cast<int>(ClockLimit::display_setting) == 8);

/// Whether this process sees the system's process numbers, not a container's.
bool in_first_pid_namespace() {
  constexpr ino_t first = 0xEFFFFFFC;  // the kernel's number, since 3.8
  struct stat entry{};
  return stat("/proc/self/ns/pid", &entry) == 0 && entry.st_ino == first;
}

/// The library, initialised. It is never closed.
class Library {
 public:
  explicit Library(const std::string& file) {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why_none_ = fmt::format("NVML cannot be loaded ({}); it comes with NVIDIA's driver", dlerror());
      return;
    }
    int (*init)() = nullptr;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function != nullptr || !why_none_.empty()) return;
      why_none_ = fmt::format("{} has no {}; drivers from 535 on have it", file, name);
    };
    find(init, "nvmlInit_v2");
    find(find_gpu_, "nvmlDeviceGetHandleByPciBusId_v2");
    find(clock_, "nvmlDeviceGetClockInfo");
    find(max_clock_, "nvmlDeviceGetMaxClockInfo");
    find(limits_, "nvmlDeviceGetCurrentClocksEventReasons");
    find(field_values_, "nvmlDeviceGetFieldValues");
    find(temperature_, "nvmlDeviceGetTemperature");
    find(power_, "nvmlDeviceGetPowerUsage");
    find(power_limit_, "nvmlDeviceGetEnforcedPowerLimit");
    // Some drivers of the 535 branch fill entries of a different size under the name with _v3.
    find(compute_processes_, "nvmlDeviceGetComputeRunningProcesses_v2");
    find(graphics_processes_, "nvmlDeviceGetGraphicsRunningProcesses_v2");
    if (!why_none_.empty()) return;
    if (const int status = init(); status != kSuccess) {
      why_none_ = fmt::format("NVML does not start (its error {}); nvidia-smi should say why", status);
    }
  }

  [[nodiscard]] DeviceHealth read(const std::string& pci_bus_id) const {
    DeviceHealth health{.why_none = why_none_};
    if (!why_none_.empty()) return health;
    Gpu gpu = nullptr;
    if (const int status = find_gpu_(pci_bus_id.c_str(), &gpu); status != kSuccess) {
      health.why_none = fmt::format("NVML does not know the GPU at {} (its error {})", pci_bus_id, status);
      return health;
    }
    health.clock_hz = ask(1e6, clock_, gpu, kSmClock);
    health.max_clock_hz = ask(1e6, max_clock_, gpu, kSmClock);
    if (unsigned long long bits = 0; limits_(gpu, &bits) == kSuccess) health.limits.emplace(bits);
    read_times(gpu, health);
    health.temperature_celsius = ask(1.0, temperature_, gpu, kGpuSensor);
    health.power_watts = ask(1e-3, power_, gpu);
    health.power_limit_watts = ask(1e-3, power_limit_, gpu);
    std::map<std::uint32_t, std::uint64_t> processes;
    if (append(compute_processes_, gpu, processes)) {
      // These are the programs of a desktop. Many server GPUs have no such list.
      static_cast<void>(append(graphics_processes_, gpu, processes));
      health.other_processes =
          others_among(std::move(processes), static_cast<std::uint32_t>(getpid()), in_first_pid_namespace());
    }
    return health;
  }

 private:
  using List = int (*)(Gpu, std::uint32_t*, Process*);

  template <class Function, class... Arguments>
  static std::optional<double> ask(double unit, Function function, Gpu gpu, Arguments... arguments) {
    std::uint32_t value = 0;
    if (function(gpu, arguments..., &value) != kSuccess) return std::nullopt;
    return unit * value;
  }

  void read_times(Gpu gpu, DeviceHealth& health) const {
    std::array<FieldValue, kTimes.size()> values{};
    for (std::size_t i = 0; i < kTimes.size(); ++i) values[i].field = kTimes[i].first;
    if (field_values_(gpu, static_cast<int>(values.size()), values.data()) != kSuccess) return;
    for (std::size_t i = 0; i < kTimes.size(); ++i) {
      if (values[i].status != kSuccess || values[i].type != kUnsignedLongLong) continue;
      health.limited_for[static_cast<std::size_t>(kTimes[i].second)] =
          std::chrono::nanoseconds(static_cast<std::int64_t>(values[i].value));
    }
  }

  static bool append(List list, Gpu gpu, std::map<std::uint32_t, std::uint64_t>& processes) {
    std::vector<Process> entries(256);  // far more than a GPU usually has; with more, the count is unknown
    auto count = static_cast<std::uint32_t>(entries.size());
    if (list(gpu, &count, entries.data()) != kSuccess) return false;
    for (std::uint32_t i = 0; i < count; ++i) processes.emplace(entries[i].number, entries[i].used_memory);
    return true;
  }

  std::string why_none_;
  int (*find_gpu_)(const char*, Gpu*) = nullptr;
  int (*clock_)(Gpu, int, std::uint32_t*) = nullptr;
  int (*max_clock_)(Gpu, int, std::uint32_t*) = nullptr;
  int (*limits_)(Gpu, unsigned long long*) = nullptr;
  int (*field_values_)(Gpu, int, FieldValue*) = nullptr;
  int (*temperature_)(Gpu, int, std::uint32_t*) = nullptr;
  int (*power_)(Gpu, std::uint32_t*) = nullptr;
  int (*power_limit_)(Gpu, std::uint32_t*) = nullptr;
  List compute_processes_ = nullptr;
  List graphics_processes_ = nullptr;
};

}  // namespace

OtherProcesses others_among(std::map<std::uint32_t, std::uint64_t> processes, std::uint32_t own_number,
                            bool numbers_are_ours) {
  const bool found = processes.erase(own_number) > 0;
  const auto count = static_cast<std::int64_t>(processes.size());
  if (!numbers_are_ours && !found && count > 0) return {.count = count - 1};
  std::uint64_t memory = 0;
  for (const auto& [number, bytes] : processes) {
    if (bytes == kUnknownMemory) return {.count = count};
    memory += bytes;
  }
  return {.count = count, .memory_bytes = memory};
}

struct Nvml::State {
  const std::string file;
  const std::chrono::nanoseconds limit;
  std::function<DeviceHealth(const std::string&)> ask{};  // holds the library; used by the asking thread only
  std::mutex mutex{};
  std::condition_variable changed{};
  bool asking = false;
  bool hangs = false;  // a caller gave up waiting for the asking thread
};

namespace {

/// A thread that is left behind unless somebody has joined it.
struct Asking {
  std::thread thread;
  ~Asking() {
    if (thread.joinable()) thread.detach();
  }
};

}  // namespace

Nvml& Nvml::of_process() {
  static auto* const nvml = new Nvml();  // never destroyed, like the library
  return *nvml;
}

Nvml::Nvml(std::string file, std::chrono::nanoseconds limit)
    : state_(std::make_shared<State>(std::move(file), limit)) {}

DeviceHealth Nvml::read(const std::string& pci_bus_id) {
  State& state = *state_;
  BlockingRegion region;
  std::unique_lock lock(state.mutex);
  const auto in_time = [&](auto done) {
    const auto over = [&] { return state.hangs || done(); };
    if (!wait_polled(region, state.changed, lock, state.limit, over)) state.hangs = true;
    return done();
  };
  if (in_time([&] { return !state.asking; })) {
    const auto answer = std::make_shared<std::optional<DeviceHealth>>();
    Asking asking;
    try {
      asking.thread = std::thread([state = state_, answer, pci_bus_id] {
        DeviceHealth health;
        try {
          if (!state->ask) {
            state->ask = [library = std::make_shared<Library>(state->file)](const std::string& gpu) {
              return library->read(gpu);
            };
          }
          health = state->ask(pci_bus_id);
        } catch (const std::exception& error) {  // out of memory
          health.why_none = error.what();
        }
        const std::lock_guard back(state->mutex);
        *answer = std::move(health);
        state->asking = state->hangs = false;
        state->changed.notify_all();
      });
    } catch (const std::system_error& error) {
      return {.why_none = fmt::format("no thread could be started to ask NVML ({})", error.what())};
    }
    state.asking = true;
    if (in_time([&] { return answer->has_value(); })) {
      lock.unlock();
      asking.thread.join();
      return **answer;
    }
  }
  return {.why_none = fmt::format("NVML has not answered within {:g} s: the driver may hang; nvidia-smi would tell",
                                  std::chrono::duration<double>(state.limit).count())};
}

}  // namespace paceline::cuda
