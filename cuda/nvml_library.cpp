// SPDX-License-Identifier: Apache-2.0
#include "nvml_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <cstdlib>
#include <initializer_list>

namespace paceline::cuda {
namespace {

constexpr const char* kSoname = "libnvidia-ml.so.1";
constexpr const char* kVariable = "PACELINE_NVML_LIBRARY";

std::string last_error() {
  const char* const text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

std::string file_of(void* library) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : "";
}

/// The first of these names that there is: the newest first, since a name's meaning never changes.
template <class F>
void find(void* library, F& function, std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    if (void* const found = dlsym(library, name); found != nullptr) {
      function = reinterpret_cast<F>(found);
      return;
    }
  }
}

std::string text_from(NvmlStatus (*function)(char*, std::uint32_t)) {
  char text[96] = {};
  if (function == nullptr || function(text, sizeof(text) - 1) != kNvmlSuccess) return {};
  return text;
}

}  // namespace

const NvmlLibrary& NvmlLibrary::of_process() {
  static const NvmlLibrary* const library = [] {
    const char* const path = std::getenv(kVariable);
    return new NvmlLibrary(path == nullptr ? "" : path);  // kept for ever
  }();
  return *library;
}

NvmlLibrary::NvmlLibrary(const std::string& explicit_path) { open(explicit_path); }

void NvmlLibrary::open(const std::string& explicit_path) {
  void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr && !explicit_path.empty()) {
    library = dlopen(explicit_path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why_none_ = fmt::format("{} names a library that cannot be loaded: {}", kVariable, last_error());
      return;
    }
  }
  if (library == nullptr) library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    why_none_ = fmt::format("it cannot be loaded ({}); it comes with NVIDIA's driver", last_error());
    return;
  }
  path_ = file_of(library);
  resolve(library);
  initialize();
}

void NvmlLibrary::resolve(void* library) {
  NvmlFunctions& f = functions_;
  find(library, f.init, {"nvmlInit_v2", "nvmlInit"});
  find(library, f.error_string, {"nvmlErrorString"});
  find(library, f.library_version, {"nvmlSystemGetNVMLVersion"});
  find(library, f.driver_version, {"nvmlSystemGetDriverVersion"});
  find(library, f.device_by_pci_bus_id, {"nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId"});
  find(library, f.clock, {"nvmlDeviceGetClockInfo"});
  find(library, f.max_clock, {"nvmlDeviceGetMaxClockInfo"});
  find(library, f.clock_limits,
       {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"});
  find(library, f.field_values, {"nvmlDeviceGetFieldValues"});
  find(library, f.temperature, {"nvmlDeviceGetTemperature"});
  find(library, f.power, {"nvmlDeviceGetPowerUsage"});
  find(library, f.power_limit, {"nvmlDeviceGetEnforcedPowerLimit"});
  // _v2 before _v3: some drivers of the 535 branch fill entries of another size under the name _v3.
  find(library, f.compute_processes,
       {"nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"});
  find(library, f.graphics_processes,
       {"nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3"});
  find(library, f.compute_processes_v1, {"nvmlDeviceGetComputeRunningProcesses"});
  find(library, f.graphics_processes_v1, {"nvmlDeviceGetGraphicsRunningProcesses"});
  find(library, f.nvlink_state, {"nvmlDeviceGetNvLinkState"});
  find(library, f.peer_status, {"nvmlDeviceGetP2PStatus"});
}

void NvmlLibrary::initialize() {
  if (functions_.init == nullptr || functions_.device_by_pci_bus_id == nullptr) {
    why_none_ = fmt::format("{} has no {}: it is no NVML, or a very old one", path_,
                            functions_.init == nullptr ? "nvmlInit" : "nvmlDeviceGetHandleByPciBusId");
    return;
  }
  const std::lock_guard lock(mutex_);
  if (const NvmlStatus status = functions_.init(); status != kNvmlSuccess) {
    const char* const text = functions_.error_string == nullptr ? nullptr : functions_.error_string(status);
    why_none_ = fmt::format("{} does not start: {} (error {}); nvidia-smi should say the same", path_,
                            text == nullptr ? "unknown" : text, static_cast<int>(status));
    return;
  }
  version_ = text_from(functions_.library_version);
  driver_version_ = text_from(functions_.driver_version);
}

}  // namespace paceline::cuda
