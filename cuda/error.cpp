// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"

#include <fmt/format.h>

#include <paceline/error.hpp>

namespace paceline::cuda {
namespace {

// Toolkits before 13 lack names for these two, but newer drivers may return them.
constexpr int kContained = 226;         // cudaErrorContained
constexpr int kTensorMemoryLeak = 721;  // cudaErrorTensorMemoryLeak
#if CUDART_VERSION >= 13000
static_assert(static_cast<int>(cudaErrorContained) == kContained &&
              static_cast<int>(cudaErrorTensorMemoryLeak) == kTensorMemoryLeak);
#endif

/// Errors after which CUDA needs a new process. The context returns them from every further call.
bool is_sticky(cudaError_t error) noexcept {
  switch (error) {
    // The runtime's header says for each that the process must end and start again. The last two are hardware errors,
    // for which the header says nothing better.
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return true;
    default:
      return static_cast<int>(error) == kContained || static_cast<int>(error) == kTensorMemoryLeak;
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
  if (is_sticky(error)) {
    throw DeviceLost(fmt::format("{}: {} failed: {}. A kernel or the hardware broke the device's context, which CUDA "
                                 "repairs only for a new process: save what you need and start again.",
                                 name, doing, text_of(error)),
                     name, where);
  }
  throw Error(fmt::format("{}: {} failed: {}", name, doing, text_of(error)), name, where);
}

int attribute(cudaDeviceAttr which, int ordinal, int otherwise) noexcept {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, ordinal) == cudaSuccess) return value;
  static_cast<void>(cudaGetLastError());
  return otherwise;
}

}  // namespace paceline::cuda
