// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

namespace paceline::cuda {

// NVML's own types, as far as they are used; nvml.h is not needed to build. Values and layouts are those of its ABI,
// which only grows.
using NvmlDevice = struct NvmlDeviceOpaque*;

enum NvmlStatus : int {
  kNvmlSuccess = 0,
  kNvmlInvalidArgument = 2,
  kNvmlNotSupported = 3,
  kNvmlInsufficientSize = 7,
};

enum NvmlClock : int { kNvmlClockSm = 1 };
enum NvmlTemperatureSensor : int { kNvmlTemperatureGpu = 0 };
enum NvmlPeerCapability : int { kNvmlPeerRead = 0, kNvmlPeerWrite = 1, kNvmlPeerNvlink = 2 };
enum NvmlPeerStatus : int { kNvmlPeerOk = 0, kNvmlPeerUnknown = 6 };
enum NvmlValueType : int { kNvmlUnsignedLongLong = 3 };

struct NvmlFieldValue {
  std::uint32_t field;
  std::uint32_t scope;
  std::int64_t timestamp;
  std::int64_t latency;
  NvmlValueType type;
  NvmlStatus status;
  std::uint64_t value;  // a union; of the fields asked here only this member is in use
};
static_assert(sizeof(NvmlFieldValue) == 40);

struct NvmlProcess {
  std::uint32_t pid;
  std::uint64_t used_memory;  // all ones: not known
  std::uint32_t gpu_instance;
  std::uint32_t compute_instance;
};
static_assert(sizeof(NvmlProcess) == 24);

/// Before drivers had MIG.
struct NvmlProcessV1 {
  std::uint32_t pid;
  std::uint64_t used_memory;
};

/// What the library exports. Null is what this copy of it lacks.
struct NvmlFunctions {
  NvmlStatus (*init)() = nullptr;
  const char* (*error_string)(NvmlStatus) = nullptr;
  NvmlStatus (*library_version)(char*, std::uint32_t) = nullptr;
  NvmlStatus (*driver_version)(char*, std::uint32_t) = nullptr;
  NvmlStatus (*device_by_pci_bus_id)(const char*, NvmlDevice*) = nullptr;
  NvmlStatus (*clock)(NvmlDevice, NvmlClock, std::uint32_t*) = nullptr;
  NvmlStatus (*max_clock)(NvmlDevice, NvmlClock, std::uint32_t*) = nullptr;
  NvmlStatus (*clock_limits)(NvmlDevice, unsigned long long*) = nullptr;
  NvmlStatus (*field_values)(NvmlDevice, int, NvmlFieldValue*) = nullptr;
  NvmlStatus (*temperature)(NvmlDevice, NvmlTemperatureSensor, std::uint32_t*) = nullptr;
  NvmlStatus (*power)(NvmlDevice, std::uint32_t*) = nullptr;
  NvmlStatus (*power_limit)(NvmlDevice, std::uint32_t*) = nullptr;
  NvmlStatus (*compute_processes)(NvmlDevice, std::uint32_t*, NvmlProcess*) = nullptr;
  NvmlStatus (*graphics_processes)(NvmlDevice, std::uint32_t*, NvmlProcess*) = nullptr;
  NvmlStatus (*compute_processes_v1)(NvmlDevice, std::uint32_t*, NvmlProcessV1*) = nullptr;
  NvmlStatus (*graphics_processes_v1)(NvmlDevice, std::uint32_t*, NvmlProcessV1*) = nullptr;
  NvmlStatus (*nvlink_state)(NvmlDevice, std::uint32_t, std::uint32_t*) = nullptr;
  NvmlStatus (*peer_status)(NvmlDevice, NvmlDevice, NvmlPeerCapability, NvmlPeerStatus*) = nullptr;
};

/// NVIDIA's management library, opened when somebody asks, never linked. Once open it stays, for the driver's sake: no
/// destructor runs at exit.
///
/// Looked for in this order: a copy that is in the process already (PyTorch's, NCCL's), `explicit_path`, the driver's
/// libnvidia-ml.so.1. An explicit path that does not work is not replaced by something else.
class NvmlLibrary {
 public:
  /// The process's own; its explicit path is the environment variable PACELINE_NVML_LIBRARY.
  [[nodiscard]] static const NvmlLibrary& of_process();

  explicit NvmlLibrary(const std::string& explicit_path);
  NvmlLibrary(const NvmlLibrary&) = delete;
  NvmlLibrary& operator=(const NvmlLibrary&) = delete;

  [[nodiscard]] bool available() const noexcept { return why_none_.empty(); }
  /// As the end of a sentence; empty if it is available.
  [[nodiscard]] const std::string& why_none() const noexcept { return why_none_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& version() const noexcept { return version_; }                ///< "13.580.65.06"
  [[nodiscard]] const std::string& driver_version() const noexcept { return driver_version_; }  ///< "580.65.06"

  [[nodiscard]] const NvmlFunctions& functions() const noexcept { return functions_; }
  /// To be held around every call: NVML's own locking has had errors.
  [[nodiscard]] std::mutex& mutex() const noexcept { return mutex_; }

 private:
  void open(const std::string& explicit_path);
  void resolve(void* library);
  void initialize();

  NvmlFunctions functions_;
  std::string why_none_;
  std::string path_;
  std::string version_;
  std::string driver_version_;
  mutable std::mutex mutex_;
};

}  // namespace paceline::cuda
