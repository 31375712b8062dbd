// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"

#include <fmt/format.h>

#include <cstddef>

#include <paceline/error.hpp>

#include "device_guard.hpp"

namespace paceline::cuda {
namespace {

// Toolkits before 13 lack names for these two, but newer drivers may return them.
constexpr int kContained = 226;         // cudaErrorContained
constexpr int kTensorMemoryLeak = 721;  // cudaErrorTensorMemoryLeak
#if CUDART_VERSION >= 13000
static_assert(static_cast<int>(cudaErrorContained) == kContained &&
              static_cast<int>(cudaErrorTensorMemoryLeak) == kTensorMemoryLeak);
#endif

constexpr char kHardware[] =
    "The hardware failed: `nvidia-smi -q` and the kernel's log (Xid) say how. Leave this GPU out if it happens again";

/// For errors after which CUDA needs a new process: what happened, and what else to do. Null for other errors. The
/// context returns such an error from every further call. For most, the runtime's header says that the process must end
/// and start again; for the last three errors it says nothing better.
const char* why_lost(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return "A kernel broke the device's context. CUDA_LAUNCH_BLOCKING=1 on one device, or compute-sanitizer, shows "
             "which one";
    case cudaErrorMpsClientTerminated:
      return "The MPS server ended this client, perhaps because another client failed; its log says why";
    case cudaErrorContextIsDestroyed:
      return "Somebody destroyed the device's context (cudaDeviceReset, for example)";
    case cudaErrorExternalDevice:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return kHardware;
    default:
      if (static_cast<int>(error) == kContained) return kHardware;
      return static_cast<int>(error) == kTensorMemoryLeak ? "A kernel ended without giving its tensor memory back"
                                                          : nullptr;
  }
}

}  // namespace

std::string text_of(cudaError_t error) {
  return fmt::format("{} ({})", cudaGetErrorString(error), cudaGetErrorName(error));
}

void check(cudaError_t error, const char* doing, int device, std::source_location where) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  const std::string name = fmt::format("cuda:{}", device);
  if (error == cudaErrorMemoryAllocation) {
    throw OutOfMemory(
        fmt::format("{}: {} failed: the device has no memory left. Use a smaller batch or model.", name, doing), name,
        where);
  }
  if (const char* const why = why_lost(error)) {
    throw DeviceLost(fmt::format("{}: {} failed: {}. {}. CUDA repairs the device only for a new process: save what you "
                                 "need and start again.",
                                 name, doing, text_of(error), why),
                     name, where);
  }
  throw Error(fmt::format("{}: {} failed: {}", name, doing, text_of(error)), name, where);
}

void check(CUresult result, const char* doing, int device, std::source_location where) {
  check(static_cast<cudaError_t>(result), doing, device, where);
}

void check_alive(int device) {
  const DeviceGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "asking whether it still works", device);
}

int attribute(cudaDeviceAttr which, int ordinal, int otherwise) noexcept {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, ordinal) == cudaSuccess) return value;
  static_cast<void>(cudaGetLastError());
  return otherwise;
}

}  // namespace paceline::cuda
