// SPDX-License-Identifier: Apache-2.0
//
// FAKE_NVML_OLD makes it a driver before 535.
#include "fake_nvml.hpp"

#include <cstddef>
#include <span>
#include <thread>

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using fake_nvml::Gpu;

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;

fake_nvml::State& state() {
  static fake_nvml::State the_state;
  return the_state;
}

/// Runs one call: notices overlapping calls, waits for the delay, and runs `body` unless a status was set for it.
template <class Body>
int call(const char* name, Body body) {
  if (state().inside.fetch_add(1) != 0) state().overlapped = true;
  std::this_thread::sleep_for(state().delay);
  while (state().hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto told = state().status.find(name);
  const int status = told == state().status.end() ? body() : told->second;
  state().inside.fetch_sub(1);
  return status;
}

template <class Value>
int give(const char* name, Value from, Value* to) {
  return call(name, [&] {
    *to = from;
    return kSuccess;
  });
}

struct Process {
  unsigned int number;
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

int give_processes(const char* name, const std::vector<fake_nvml::Process>& from, unsigned int* count, Process* to) {
  return call(name, [&] {
    const auto room = *count;
    *count = static_cast<unsigned int>(from.size());
    if (room < from.size()) return kInsufficientSize;
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = {from[i].number, from[i].memory, 0, 0};
    return kSuccess;
  });
}

}  // namespace

FAKE_EXPORT fake_nvml::State* fake_nvml_state() { return &state(); }

FAKE_EXPORT int nvmlInit_v2() {
  return call("nvmlInit_v2", [] { return kSuccess; });
}
FAKE_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, Gpu** device) {
  return call("nvmlDeviceGetHandleByPciBusId_v2", [&] {
    const auto found = state().gpus.find(bus_id);
    if (found == state().gpus.end()) return kNotFound;
    *device = &found->second;
    return kSuccess;
  });
}
FAKE_EXPORT int nvmlDeviceGetClockInfo(Gpu* gpu, int clock, unsigned int* mhz) {
  return clock == 1 ? give("nvmlDeviceGetClockInfo", gpu->clock_mhz, mhz) : kInvalidArgument;
}
FAKE_EXPORT int nvmlDeviceGetMaxClockInfo(Gpu* gpu, int clock, unsigned int* mhz) {
  return clock == 1 ? give("nvmlDeviceGetMaxClockInfo", gpu->max_clock_mhz, mhz) : kInvalidArgument;
}
#ifndef FAKE_NVML_OLD
FAKE_EXPORT int nvmlDeviceGetCurrentClocksEventReasons(Gpu* gpu, unsigned long long* bits) {
  return give("nvmlDeviceGetCurrentClocksEventReasons", gpu->limits, bits);
}
#endif
FAKE_EXPORT int nvmlDeviceGetFieldValues(Gpu* gpu, int count, FieldValue* values) {
  return call("nvmlDeviceGetFieldValues", [&] {
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
FAKE_EXPORT int nvmlDeviceGetTemperature(Gpu* gpu, int sensor, unsigned int* celsius) {
  return sensor == 0 ? give("nvmlDeviceGetTemperature", gpu->temperature, celsius) : kInvalidArgument;
}
FAKE_EXPORT int nvmlDeviceGetPowerUsage(Gpu* gpu, unsigned int* milliwatts) {
  return give("nvmlDeviceGetPowerUsage", gpu->power_milliwatts, milliwatts);
}
FAKE_EXPORT int nvmlDeviceGetEnforcedPowerLimit(Gpu* gpu, unsigned int* milliwatts) {
  return give("nvmlDeviceGetEnforcedPowerLimit", gpu->power_limit_milliwatts, milliwatts);
}
FAKE_EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(Gpu* gpu, unsigned int* count, Process* processes) {
  return give_processes("nvmlDeviceGetComputeRunningProcesses_v2", gpu->compute, count, processes);
}
FAKE_EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v2(Gpu* gpu, unsigned int* count, Process* processes) {
  return give_processes("nvmlDeviceGetGraphicsRunningProcesses_v2", gpu->graphics, count, processes);
}
