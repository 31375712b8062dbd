// SPDX-License-Identifier: Apache-2.0
#include "borrowed_array.hpp"

#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <utility>

#include <paceline/error.hpp>

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

constexpr const char* kSupported = "float32, float64, float16, bfloat16, int32 and int64";

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

/// `label` names the argument; `reason` goes on about the array.
template <class... Arguments>
[[noreturn]] void refuse(const std::string& label, py::handle object, fmt::format_string<Arguments...> reason,
                         Arguments&&... arguments) {
  throw InvalidArgument(
      fmt::format("{} ({}) {}", label, type_name(object), fmt::format(reason, std::forward<Arguments>(arguments)...)));
}

[[noreturn]] void refuse_read_only(const std::string& label, py::handle object) {
  refuse(label, object, "is read-only, and the result is written into it; pass a writable array");
}

[[noreturn]] void refuse_strided(const std::string& label, py::handle object) {
  refuse(label, object,
         "is not contiguous (C order): its elements do not lie one after the other; pass a contiguous array and copy "
         "the result back");
}

// Calls foreign code. An exception becomes an InvalidArgument with its text; KeyboardInterrupt and the like pass
// unchanged.
template <class Call>
auto translated(const std::string& label, py::handle object, const char* what, Call call) {
  try {
    return call();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    refuse(label, object, "{}: {}", what, std::string(py::str(error.value())));
  }
}

std::optional<DType> known_type(const dlpack::DataType& type) {
  struct Known {
    dlpack::DataType theirs;
    DType ours;
  };
  constexpr Known all[] = {{{dlpack::kFloat, 32, 1}, DType::float32}, {{dlpack::kFloat, 64, 1}, DType::float64},
                           {{dlpack::kFloat, 16, 1}, DType::float16}, {{dlpack::kBFloat, 16, 1}, DType::bfloat16},
                           {{dlpack::kInt, 32, 1}, DType::int32},     {{dlpack::kInt, 64, 1}, DType::int64}};
  for (const auto& [theirs, ours] : all) {
    if (theirs.code == type.code && theirs.bits == type.bits && theirs.lanes == type.lanes) return ours;
  }
  return std::nullopt;
}

std::string describe(const dlpack::DataType& type) {
  constexpr const char* names[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string name =
      type.code < std::size(names) ? names[type.code] : fmt::format("DLPack type {} of ", type.code);
  return fmt::format("{}{}{}", name, type.bits, type.lanes == 1 ? "" : fmt::format("x{}", type.lanes));
}

// The buffer protocol uses the type letters of the struct module. The size of some types ('l') differs by platform, so
// it comes from the buffer.
std::optional<DType> known_type(std::string_view format, Py_ssize_t item_bytes) {
  if (!format.empty() && (format.front() == '@' || format.front() == '=' ||
                          (format.front() == '<' && PY_LITTLE_ENDIAN) || (format.front() == '>' && PY_BIG_ENDIAN))) {
    format.remove_prefix(1);
  }
  if (format.size() != 1) return std::nullopt;
  const bool floating = std::string_view("efd").find(format.front()) != std::string_view::npos;
  if (!floating && std::string_view("ilq").find(format.front()) == std::string_view::npos) return std::nullopt;
  const auto bits = static_cast<std::uint8_t>(8 * item_bytes);
  return known_type(dlpack::DataType{floating ? dlpack::kFloat : dlpack::kInt, bits, 1});
}

// Asks for memory that is not a copy, and for the read-only flag, which only versioned capsules carry. Older producers
// know neither keyword. On a GPU, asks the producer to order its work before the legacy default stream.
py::object call_dlpack(py::handle object, const Device& device) {
  constexpr int legacy_default_stream = 1;
  py::dict stream;
  if (device.kind == DeviceKind::cuda) stream["stream"] = legacy_default_stream;
  const py::object method = object.attr("__dlpack__");
  try {
    return method("max_version"_a = py::make_tuple(dlpack::kMajorVersion, 0), "copy"_a = false, **stream);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method(**stream);
}

void check_place(py::handle object, const std::string& label, const dlpack::Device& place, const Device& device) {
  if (device.kind == DeviceKind::cuda) {
    if (place.type == dlpack::kCuda && place.id == device.index) return;
    refuse(
        label, object,
        "is not in the memory of {} (DLPack device type {}, number {}), whose array it has to be; move it there first",
        device.name, place.type, place.id);
  }
  if (place.type == dlpack::kCpu || place.type == dlpack::kCudaHost || place.type == dlpack::kRocmHost) return;
  refuse(label, object,
         "is not in the memory of the CPU (DLPack device type {}, number {}), where host devices reduce; move it there "
         "first",
         place.type, place.id);
}

// JAX arrays are immutable, but their unversioned capsules do not say so.
bool is_immutable(py::handle object) {
  const py::object module = py::getattr(py::type::handle_of(object), "__module__", py::str());
  return py::isinstance<py::str>(module) && std::string_view(module.cast<std::string>()).starts_with("jax");
}

}  // namespace

BorrowedArray::BorrowedArray(py::handle object, const std::string& label, Access access, const Device& device) {
  if (py::hasattr(object, "__dlpack__")) {
    take_dlpack(object, label, access, device);
    return;
  }
  if (PyObject_CheckBuffer(object.ptr()) == 0) {
    throw InvalidArgument(fmt::format(
        "{} is a {}, not an array; pass something with __dlpack__ (torch, NumPy, JAX, CuPy) or the buffer protocol "
        "(array.array, memoryview)",
        label, type_name(object)));
  }
  if (device.kind != DeviceKind::host) check_place(object, label, {dlpack::kCpu, 0}, device);
  take_buffer(object, label, access);
}

/// Returns null, and takes nothing, if the type has no such table.
const dlpack::ExchangeApi* BorrowedArray::take_from_exchange_api(py::handle object, const std::string& label) {
  const dlpack::ExchangeApi* const api = dlpack::exchange_api_of(py::type::handle_of(object));
  if (api == nullptr) return nullptr;
  translated(label, object, "cannot be used through DLPack", [&] {
    dlpack::ManagedTensorVersioned* taken = nullptr;
    if (api->managed_tensor_from_object(object.ptr(), &taken) != 0) throw py::error_already_set();
    versioned_.reset(taken);
  });
  return api;
}

void BorrowedArray::take_capsule(py::handle object, const std::string& label, const Device& device) {
  translated(label, object, "cannot be used through DLPack", [&] {
    if (!py::hasattr(object, "__dlpack_device__")) return;
    const py::tuple place = object.attr("__dlpack_device__")();
    check_place(object, label, {py::int_(place[0]).cast<std::int32_t>(), py::int_(place[1]).cast<std::int32_t>()},
                device);
  });
  const py::object capsule =
      translated(label, object, "cannot be used through DLPack", [&] { return call_dlpack(object, device); });
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kVersionedCapsule) != 0) {
    versioned_.reset(
        static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kVersionedCapsule)));
    PyCapsule_SetName(capsule.ptr(), dlpack::kUsedVersionedCapsule);
  } else if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) != 0) {
    managed_.reset(static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule)));
    PyCapsule_SetName(capsule.ptr(), dlpack::kUsedCapsule);
  } else {
    refuse(label, object, "returned no DLPack capsule from __dlpack__");
  }
}

void BorrowedArray::take_dlpack(py::handle object, const std::string& label, Access access, const Device& device) {
  // torch also checks this, but only on some paths of some versions, and without naming the argument.
  if (py::bool_(py::getattr(object, "requires_grad", py::bool_(false)))) {
    refuse(label, object,
           "requires grad: autograd would not see what is done to it; pass its .grad, or .detach() of it");
  }
  const dlpack::ExchangeApi* const api = take_from_exchange_api(object, label);
  if (api == nullptr) take_capsule(object, label, device);

  if (versioned_ != nullptr) {
    if (versioned_->version.major != dlpack::kMajorVersion) {  // unknown layout: only the deleter may be used
      refuse(label, object, "speaks DLPack {}.{}; this build knows version {}", versioned_->version.major,
             versioned_->version.minor, dlpack::kMajorVersion);
    }
    if (access == Access::write && (versioned_->flags & dlpack::kFlagReadOnly) != 0) refuse_read_only(label, object);
    if (access == Access::write && (versioned_->flags & dlpack::kFlagIsCopied) != 0) {
      refuse(label, object,
             "lends only a copy of its memory, and the result would be lost with it; pass a plain array");
    }
  }
  if (access == Access::write && is_immutable(object)) refuse_read_only(label, object);
  const dlpack::Tensor* const tensor = versioned_ != nullptr ? &versioned_->tensor : &managed_->tensor;
  check_place(object, label, tensor->device, device);
  void* stream = nullptr;
  if (tensor->device.type == dlpack::kCuda) {
    stream_unknown_ = api == nullptr;
    translated(label, object, "does not tell its stream", [&] {
      if (api == nullptr) return;
      if (api->current_work_stream(tensor->device.type, tensor->device.id, &stream) != 0) throw py::error_already_set();
    });
  }

  const std::optional<DType> dtype = known_type(tensor->dtype);
  if (!dtype) {
    refuse(label, object, "has elements of type {}; supported are {}", describe(tensor->dtype), kSupported);
  }
  if (!dlpack::is_contiguous(*tensor)) refuse_strided(label, object);
  char* data = static_cast<char*>(tensor->data);
  view_ = {data == nullptr ? nullptr : data + tensor->byte_offset, static_cast<std::size_t>(dlpack::count_of(*tensor)),
           *dtype, static_cast<NativeStream>(stream)};
}

void BorrowedArray::take_buffer(py::handle object, const std::string& label, Access access) {
  // Not by pybind11's buffer_info, which cannot read a buffer without a format.
  translated(label, object, "does not lend its memory", [&] {
    auto lent = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(object.ptr(), lent.get(), PyBUF_STRIDES | PyBUF_FORMAT) != 0) throw py::error_already_set();
    buffer_.reset(lent.release());
  });
  const std::string_view format = buffer_->format == nullptr ? "B" : buffer_->format;  // by PEP 3118 they are bytes
  const std::optional<DType> dtype = known_type(format, buffer_->itemsize);
  if (!dtype) {
    refuse(label, object,
           "has elements of format '{}'; supported are {} in native byte order (of raw bytes, pass "
           "memoryview(x).cast(\"f\") or the like)",
           format, kSupported);
  }
  if (access == Access::write && buffer_->readonly != 0) refuse_read_only(label, object);
  if (PyBuffer_IsContiguous(buffer_.get(), 'C') == 0) refuse_strided(label, object);
  view_ = {buffer_->buf, static_cast<std::size_t>(buffer_->len / buffer_->itemsize), *dtype};
}

}  // namespace paceline::python
