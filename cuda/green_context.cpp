// SPDX-License-Identifier: Apache-2.0
#include "green_context.hpp"

#include "device_guard.hpp"
#include "driver.hpp"
#include "error.hpp"

namespace paceline::cuda {
namespace {

CUdevice handle_of(int device) {
  CUdevice handle = 0;
  check(driver().device_get(&handle, device), "finding the device", device);
  return handle;
}

}  // namespace

std::vector<CUdevResource> split_sms(int device) {
  const GreenDriver& green = green_driver();
  // The driver rounds up to the smallest group that the GPU allows. Merged groups make parts of any size. The newer
  // cuDevSmResourceSplit takes several sizes, but it would only add the need for a newer driver.
  constexpr unsigned int smallest = 1;
  CUdevResource whole{};
  check(green.device_resource(handle_of(device), &whole, CU_DEV_RESOURCE_TYPE_SM), "asking for its SMs", device);
  unsigned int count = 0;
  check(green.split_by_count(nullptr, &count, &whole, nullptr, 0, smallest), "counting groups of SMs", device);
  std::vector<CUdevResource> groups(count);
  if (count == 0) return groups;
  check(green.split_by_count(groups.data(), &count, &whole, nullptr, 0, smallest), "splitting its SMs", device);
  groups.resize(count);
  return groups;
}

GreenContext::GreenContext(int device, std::span<CUdevResource> groups) : device_(device), shelf_(device) {
  const GreenDriver& green = green_driver();
  // Pushes the primary context. Otherwise every green context would create and destroy it again.
  const DeviceGuard guard(device);
  CUdevResourceDesc description = nullptr;
  check(green.describe(&description, groups.data(), static_cast<unsigned int>(groups.size())), "describing a part",
        device);
  check(green.create(&context_, description, handle_of(device), CU_GREEN_CTX_DEFAULT_STREAM), "making a part", device);
  CUdevResource got{};
  const CUresult result = green.context_resource(context_, &got, CU_DEV_RESOURCE_TYPE_SM);
  if (result != CUDA_SUCCESS) {
    static_cast<void>(green.destroy(context_));
    check(result, "asking a part for its SMs", device);
  }
  sm_count_ = static_cast<int>(got.sm.smCount);
}

GreenContext::~GreenContext() {
  shelf_.clear();
  destroy_on(device_, [this] { return green_driver().destroy(context_); });
}

cudaStream_t GreenContext::make_stream() {
  if (cudaStream_t stream = shelf_.take()) return stream;
  const std::lock_guard lock(mutex_);  // a green context has no lock of its own
  const DeviceGuard guard(device_);
  CUstream stream = nullptr;
  check(green_driver().make_stream(&stream, context_, CU_STREAM_NON_BLOCKING, 0), "making a stream", device_);
  return stream;
}

}  // namespace paceline::cuda
