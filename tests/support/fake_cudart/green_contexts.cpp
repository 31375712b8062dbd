// SPDX-License-Identifier: Apache-2.0
#include "green_contexts.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "machine.hpp"

namespace fake {
namespace {

/// The content of a resource, stored where the driver hides its own.
struct Sms {
  int device = 0;
  unsigned int split = 0;  ///< the number of the call that made it; 0: the whole GPU
  int first = 0;
  int count = 0;
};
static_assert(sizeof(Sms) <= sizeof(CUdevResource::_internal_padding));

CUdevResource resource_of(const Sms& sms) {
  CUdevResource resource{};
  resource.type = CU_DEV_RESOURCE_TYPE_SM;
  std::memcpy(resource._internal_padding, &sms, sizeof(sms));
  resource.sm.smCount = static_cast<unsigned int>(sms.count);
  return resource;
}

Sms sms_of(const CUdevResource& resource) {
  Sms sms;
  std::memcpy(&sms, resource._internal_padding, sizeof(sms));
  return sms;
}

struct Description {
  int device = 0;
  std::vector<int> sms;
};

/// Kept for ever, because CUDA has no call to free them either.
std::vector<std::unique_ptr<Description>>& descriptions() {
  static auto* const all = new std::vector<std::unique_ptr<Description>>;
  return *all;
}

GreenContext* as_green(CUgreenCtx context) {
  auto* const green = reinterpret_cast<GreenContext*>(context);
  if (!machine().known(green)) misuse("a green context that was destroyed was used");
  return green;
}

CUresult health(int device) { return static_cast<CUresult>(machine().health(device)); }

}  // namespace

CUresult device_resource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  const std::lock_guard lock(machine().mutex);
  if (device < 0 || device >= machine().settings().device_count) return CUDA_ERROR_INVALID_DEVICE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  *resource = resource_of({device, 0, 0, machine().settings().multiprocessors});
  return CUDA_SUCCESS;
}

CUresult split_by_count(CUdevResource* result, unsigned int* group_count, const CUdevResource* input,
                        CUdevResource* remaining, unsigned int flags, unsigned int least) {
  static unsigned int splits = 0;
  const std::lock_guard lock(machine().mutex);
  const Sms whole = sms_of(*input);
  const int granularity = machine().settings().sm_granularity;
  if (flags != 0) misuse("SMs were split with flags that the fake does not know");
  if (whole.split != 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;  // a part is not split again
  if (least > static_cast<unsigned int>(whole.count)) return CUDA_ERROR_INVALID_VALUE;
  const int size = std::max(1, (static_cast<int>(least) + granularity - 1) / granularity) * granularity;
  unsigned int count = static_cast<unsigned int>(whole.count / size);
  if (result != nullptr) count = std::min(count, *group_count);
  *group_count = count;
  if (result == nullptr) return CUDA_SUCCESS;
  const unsigned int split = ++splits;
  int first = whole.first;
  for (unsigned int k = 0; k < count; ++k, first += size) result[k] = resource_of({whole.device, split, first, size});
  if (remaining != nullptr) *remaining = resource_of({whole.device, split, first, whole.count - first});
  return CUDA_SUCCESS;
}

CUresult describe(CUdevResourceDesc* description, CUdevResource* resources, unsigned int count) {
  const std::lock_guard lock(machine().mutex);
  if (count == 0) return CUDA_ERROR_INVALID_VALUE;
  auto made = std::make_unique<Description>();
  made->device = sms_of(resources[0]).device;
  for (unsigned int k = 0; k < count; ++k) {
    const Sms sms = sms_of(resources[k]);
    const bool same_split = sms.device == made->device && sms.split == sms_of(resources[0]).split;
    if (!same_split) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    for (int sm = sms.first; sm < sms.first + sms.count; ++sm) made->sms.push_back(sm);
  }
  *description = reinterpret_cast<CUdevResourceDesc>(made.get());
  descriptions().push_back(std::move(made));
  return CUDA_SUCCESS;
}

CUresult create_green_context(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device, unsigned int flags) {
  const std::lock_guard lock(machine().mutex);
  const auto& described = *reinterpret_cast<Description*>(description);
  if (flags != CU_GREEN_CTX_DEFAULT_STREAM || described.device != device) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = health(device); error != CUDA_SUCCESS) return error;
  GreenContext* const made = machine().make_green_context(device, described.sms);
  if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *context = reinterpret_cast<CUgreenCtx>(made);
  return CUDA_SUCCESS;
}

CUresult destroy_green_context(CUgreenCtx context) {
  const std::lock_guard lock(machine().mutex);
  machine().destroy(as_green(context));
  return CUDA_SUCCESS;
}

CUresult green_context_resource(CUgreenCtx context, CUdevResource* resource, CUdevResourceType type) {
  const std::lock_guard lock(machine().mutex);
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  const GreenContext& green = *as_green(context);
  *resource = resource_of({green.device, 0, green.sms.front(), static_cast<int>(green.sms.size())});
  return CUDA_SUCCESS;
}

CUresult create_green_stream(CUstream* stream, CUgreenCtx context, unsigned int flags, int) {
  const std::lock_guard lock(machine().mutex);
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  GreenContext* const green = as_green(context);
  if (const CUresult error = health(green->device); error != CUDA_SUCCESS) return error;
  *stream = reinterpret_cast<CUstream>(machine().make_stream(green->device, green));
  return CUDA_SUCCESS;
}

}  // namespace fake
