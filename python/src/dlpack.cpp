// SPDX-License-Identifier: Apache-2.0
#include "dlpack.hpp"

namespace py = pybind11;

namespace paceline::dlpack {

const ExchangeApi* exchange_api_of(py::handle type) {
  for (const char* const name : kExchangeApiAttributes) {
    const py::object attribute = py::getattr(type, name, py::none());
    const void* found = nullptr;
    if (PyCapsule_IsValid(attribute.ptr(), kExchangeApiCapsule) != 0) {
      found = PyCapsule_GetPointer(attribute.ptr(), kExchangeApiCapsule);
    } else if (PyLong_Check(attribute.ptr()) != 0) {
      found = PyLong_AsVoidPtr(attribute.ptr());
      if (PyErr_Occurred() != nullptr) PyErr_Clear();  // the attribute is not an address
    }
    const auto* header = static_cast<const ExchangeApiHeader*>(found);
    while (header != nullptr && header->version.major != kMajorVersion) header = header->previous;
    if (header != nullptr) return reinterpret_cast<const ExchangeApi*>(header);
  }
  return nullptr;
}

std::int64_t count_of(const Tensor& tensor) {
  std::int64_t count = 1;
  for (std::int32_t d = 0; d < tensor.dimension_count; ++d) count *= tensor.shape[d];
  return count;
}

bool is_contiguous(const Tensor& tensor) {
  if (tensor.strides == nullptr || count_of(tensor) <= 1) return true;
  std::int64_t expected = 1;
  for (std::int32_t d = tensor.dimension_count - 1; d >= 0; --d) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != expected) return false;
    expected *= tensor.shape[d];
  }
  return true;
}

}  // namespace paceline::dlpack
