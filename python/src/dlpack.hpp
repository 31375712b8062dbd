// SPDX-License-Identifier: Apache-2.0
#pragma once

// DLPack's binary interface: the layout that a `__dlpack__` capsule points to. It matches DLPack 1.x, where a new
// layout needs a new major version. The unversioned struct matches all earlier versions.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paceline::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::uint64_t kFlagReadOnly = 1;
inline constexpr std::uint64_t kFlagIsCopied = 2;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

inline constexpr std::int32_t kCuda = 2;  // GPU memory; the id is the CUDA runtime's number of the GPU

// Device types whose memory the processor can access directly and at once.
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCudaHost = 3;   // pinned
inline constexpr std::int32_t kRocmHost = 11;  // pinned

struct Device {
  std::int32_t type;
  std::int32_t id;
};

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kOpaque = 3, kBFloat = 4, kComplex = 5, kBool = 6 };

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dimension_count;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means contiguous (allowed before 1.2)
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);  // may be null
};

struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned* self);  // may be null; must be called for every version
  std::uint64_t flags;
  Tensor tensor;
};

struct Deleter {
  template <class Managed>
  void operator()(Managed* managed) const noexcept {
    // A deleter may run Python code, which must neither see nor lose a pending exception.
    const pybind11::error_scope keep_pending_error;
    if (managed->deleter != nullptr) managed->deleter(managed);
  }
};
template <class Managed>
using Owner = std::unique_ptr<Managed, Deleter>;

static_assert(sizeof(void*) != 8 ||
              (sizeof(Tensor) == 48 && offsetof(Tensor, shape) == 24 && sizeof(ManagedTensor) == 64 &&
               offsetof(ManagedTensorVersioned, flags) == 24 && offsetof(ManagedTensorVersioned, tensor) == 32));

// The C exchange API: functions that an array type offers beside `__dlpack__`. They do not synchronise streams: the
// consumer works on the producer's current stream.
struct ExchangeApiHeader {
  Version version;
  const ExchangeApiHeader* previous;  // an older table, or null
};

struct ExchangeApi {
  ExchangeApiHeader header;
  void* managed_tensor_allocator;
  int (*managed_tensor_from_object)(void* object,
                                    ManagedTensorVersioned** tensor);  // nonzero: a Python exception is set
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* tensor);  // lends what the object keeps; may be null; result as above
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);  // result as above
};

static_assert(sizeof(void*) != 8 || (sizeof(ExchangeApi) == 56 && offsetof(ExchangeApi, current_work_stream) == 48));

// The type's attribute, today's name and PyTorch's first one. It holds a capsule or, in early versions, an address.
inline constexpr const char* kExchangeApiAttributes[] = {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"};
inline constexpr const char* kExchangeApiCapsule = "dlpack_exchange_api";

/// The exchange table of an array type, in the version that this build knows, or null.
const ExchangeApi* exchange_api_of(pybind11::handle type);

[[nodiscard]] std::int64_t count_of(const Tensor& tensor);
/// Whether the elements lie one after the other, in C order.
[[nodiscard]] bool is_contiguous(const Tensor& tensor);

// Capsule names. A consumer renames the capsule that it takes, so that the capsule's destructor does nothing.
inline constexpr const char* kCapsule = "dltensor";
inline constexpr const char* kUsedCapsule = "used_dltensor";
inline constexpr const char* kVersionedCapsule = "dltensor_versioned";
inline constexpr const char* kUsedVersionedCapsule = "used_dltensor_versioned";

}  // namespace paceline::dlpack
