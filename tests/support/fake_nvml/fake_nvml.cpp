// SPDX-License-Identifier: Apache-2.0
//
// FAKE_NVML_OLD: the names of drivers before 455, and no field values. FAKE_NVML_BARE: only what finds a GPU.
// FAKE_NVML_FOREIGN: a library that is no NVML.
#include "fake_nvml.hpp"

#include <cstddef>
#include <cstring>
#include <span>
#include <thread>

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;

fake_nvml::State& state() {
  static fake_nvml::State the_state;
  return the_state;
}

/// One call: notices others beside it, takes its time, and knows what it has been told to answer.
class Call {
 public:
  explicit Call(const char* name) {
    if (state().inside.fetch_add(1) != 0) state().overlapped = true;
    std::this_thread::sleep_for(state().delay);
    while (state().hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto found = state().status.find(name);
    status_ = found == state().status.end() ? kSuccess : found->second;
  }
  ~Call() { state().inside.fetch_sub(1); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] int status() const { return status_; }
  template <class Body>
  [[nodiscard]] int answer(Body body) const {
    return status_ == kSuccess ? body() : status_;
  }

 private:
  int status_ = kSuccess;
};

}  // namespace

FAKE_EXPORT fake_nvml::State* fake_nvml_state() { return &state(); }

#ifndef FAKE_NVML_FOREIGN

namespace {

using fake_nvml::Gpu;

[[maybe_unused]] int copy_text(const std::string& from, char* to, unsigned int length) {
  if (from.size() + 1 > length) return kInsufficientSize;
  std::memcpy(to, from.c_str(), from.size() + 1);
  return kSuccess;
}

int find_gpu(const char* bus_id, Gpu** device) {
  const auto found = state().gpus.find(bus_id);
  if (found == state().gpus.end()) return kNotFound;
  *device = &found->second;
  return kSuccess;
}

template <class Value>
[[maybe_unused]] int give(const char* name, Value from, Value* to) {
  return Call(name).answer([&] {
    *to = from;
    return kSuccess;
  });
}

template <class Entry>
[[maybe_unused]] int give_processes(const char* name, const std::vector<fake_nvml::Process>& from, unsigned int* count,
                                    Entry* to) {
  return Call(name).answer([&] {
    const auto room = *count;
    *count = static_cast<unsigned int>(from.size());
    if (room < from.size()) return kInsufficientSize;
    for (std::size_t i = 0; i < from.size(); ++i) {
      to[i] = {};
      to[i].pid = from[i].pid;
      to[i].memory = from[i].memory;
    }
    return kSuccess;
  });
}

struct ProcessV1 {
  unsigned int pid;
  unsigned long long memory;
};
struct ProcessV2 {
  unsigned int pid;
  unsigned long long memory;
  unsigned int gpu_instance;
  unsigned int compute_instance;
};
struct FieldValue {
  unsigned int field;
  unsigned int scope;
  long long timestamp;
  long long latency;
  int type;
  int status;
  unsigned long long value;
};

int start(const char* name) {
  return Call(name).answer([] {
    ++state().starts;
    return kSuccess;
  });
}

}  // namespace

FAKE_EXPORT int nvmlShutdown() {
  ++state().stops;
  return kSuccess;
}
FAKE_EXPORT const char* nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : "Some Error"; }

#ifdef FAKE_NVML_OLD
FAKE_EXPORT int nvmlInit() { return start("nvmlInit"); }
FAKE_EXPORT int nvmlDeviceGetHandleByPciBusId(const char* bus_id, Gpu** device) {
  return Call("nvmlDeviceGetHandleByPciBusId").answer([&] { return find_gpu(bus_id, device); });
}
#else
FAKE_EXPORT int nvmlInit_v2() { return start("nvmlInit_v2"); }
FAKE_EXPORT int nvmlInit() { return 999; }  // of the first generation: must not be taken
FAKE_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, Gpu** device) {
  return Call("nvmlDeviceGetHandleByPciBusId_v2").answer([&] { return find_gpu(bus_id, device); });
}
FAKE_EXPORT int nvmlDeviceGetHandleByPciBusId(const char*, Gpu**) { return 999; }
#endif

#ifndef FAKE_NVML_BARE

FAKE_EXPORT int nvmlSystemGetNVMLVersion(char* text, unsigned int length) {
  return Call("nvmlSystemGetNVMLVersion").answer([&] {
    return copy_text("13." + state().driver_version, text, length);
  });
}
FAKE_EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned int length) {
  return Call("nvmlSystemGetDriverVersion").answer([&] { return copy_text(state().driver_version, text, length); });
}
FAKE_EXPORT int nvmlDeviceGetClockInfo(Gpu* gpu, int clock, unsigned int* mhz) {
  return clock == 1 ? give("nvmlDeviceGetClockInfo", gpu->clock_mhz, mhz) : kInvalidArgument;
}
FAKE_EXPORT int nvmlDeviceGetMaxClockInfo(Gpu* gpu, int clock, unsigned int* mhz) {
  return clock == 1 ? give("nvmlDeviceGetMaxClockInfo", gpu->max_clock_mhz, mhz) : kInvalidArgument;
}
FAKE_EXPORT int nvmlDeviceGetTemperature(Gpu* gpu, int sensor, unsigned int* celsius) {
  return sensor == 0 ? give("nvmlDeviceGetTemperature", gpu->temperature, celsius) : kInvalidArgument;
}
FAKE_EXPORT int nvmlDeviceGetPowerUsage(Gpu* gpu, unsigned int* milliwatts) {
  return give("nvmlDeviceGetPowerUsage", gpu->power_milliwatts, milliwatts);
}
FAKE_EXPORT int nvmlDeviceGetEnforcedPowerLimit(Gpu* gpu, unsigned int* milliwatts) {
  return give("nvmlDeviceGetEnforcedPowerLimit", gpu->power_limit_milliwatts, milliwatts);
}
FAKE_EXPORT int nvmlDeviceGetNvLinkState(Gpu* gpu, unsigned int link, unsigned int* active) {
  return Call("nvmlDeviceGetNvLinkState").answer([&] {
    if (link >= 18) return kInvalidArgument;
    if (link >= gpu->links.size()) return kNotSupported;
    *active = static_cast<unsigned int>(gpu->links[link]);
    return kSuccess;
  });
}
FAKE_EXPORT int nvmlDeviceGetP2PStatus(Gpu* from, Gpu* to, int capability, int* status) {
  return Call("nvmlDeviceGetP2PStatus").answer([&] {
    if (capability < 0 || capability > 4) return kInvalidArgument;
    *status = 5;
    for (const auto& [bus_id, gpu] : state().gpus) {
      const auto known = from->peers.find(bus_id);
      if (&gpu == to && known != from->peers.end()) *status = known->second;
    }
    return kSuccess;
  });
}

#ifdef FAKE_NVML_OLD
FAKE_EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu* gpu, unsigned long long* bits) {
  return give("nvmlDeviceGetCurrentClocksThrottleReasons", gpu->limits, bits);
}
FAKE_EXPORT int nvmlDeviceGetComputeRunningProcesses(Gpu* gpu, unsigned int* count, ProcessV1* processes) {
  return give_processes("nvmlDeviceGetComputeRunningProcesses", gpu->compute, count, processes);
}
FAKE_EXPORT int nvmlDeviceGetGraphicsRunningProcesses(Gpu* gpu, unsigned int* count, ProcessV1* processes) {
  return give_processes("nvmlDeviceGetGraphicsRunningProcesses", gpu->graphics, count, processes);
}
#else
FAKE_EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Gpu* gpu, unsigned long long* bits) {
  return give("nvmlDeviceGetCurrentClocksEventReasons", gpu->limits, bits);
}
FAKE_EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(Gpu* gpu, unsigned int* count, ProcessV2* processes) {
  return give_processes("nvmlDeviceGetComputeRunningProcesses_v2", gpu->compute, count, processes);
}
FAKE_EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v2(Gpu* gpu, unsigned int* count, ProcessV2* processes) {
  return give_processes("nvmlDeviceGetGraphicsRunningProcesses_v2", gpu->graphics, count, processes);
}
// As some drivers of the 535 branch fill it: larger entries, which are a buffer overrun to whoever trusts the name.
FAKE_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Gpu*, unsigned int*, ProcessV2*) { return 999; }
FAKE_EXPORT int nvmlDeviceGetComputeRunningProcesses(Gpu*, unsigned int*, ProcessV1*) { return 999; }

FAKE_EXPORT int nvmlDeviceGetFieldValues(Gpu* gpu, int count, FieldValue* values) {
  return Call("nvmlDeviceGetFieldValues").answer([&] {
    for (FieldValue& value : std::span(values, static_cast<std::size_t>(count))) {
      const auto found = gpu->fields.find(value.field);
      value.status = found == gpu->fields.end() ? kNotSupported : found->second.status;
      if (found == gpu->fields.end()) continue;
      value.type = found->second.type;
      value.value = found->second.value;
    }
    return kSuccess;
  });
}
#endif
#endif  // FAKE_NVML_BARE
#endif  // FAKE_NVML_FOREIGN
