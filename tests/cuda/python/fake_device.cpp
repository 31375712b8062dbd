// SPDX-License-Identifier: Apache-2.0
// A PyTorch device in host memory, which stands for GPUs: memory of each device by itself, streams, events, and who
// waited for whom.
//
// Work is done during the call. What is checked is whether a GPU could have done it later: an operator may only use
// what was written on its own stream, or on one that its stream has waited for; freed memory may be taken for something
// else only if no other stream may still use it, unless that stream was named by `record_stream`. A copy to the host
// that does not block arrives when the host waits for it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fake_allocator.hpp"
#include "fake_machine.hpp"

namespace {

Allocator g_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = t_device;
    t_device = device.index();
    return {kType, static_cast<c10::DeviceIndex>(before)};
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(t_device)}; }
  void setDevice(c10::Device device) const override { t_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return as_stream(device, stream_of(device.index())); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(device, device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    const int before = stream_of(device);
    t_streams[device] = static_cast<int>(stream.id());
    return as_stream(stream.device(), before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Seen*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const std::lock_guard lock(machine().mutex);
    delete static_cast<Seen*>(*event);
    *event = new Seen(machine().mark(static_cast<int>(stream.id())));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::lock_guard lock(machine().mutex);
    if (event != nullptr) machine().wait(static_cast<int>(stream.id()), *static_cast<Seen*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const std::lock_guard lock(machine().mutex);
    const auto found = machine().memory.find(data.get());
    if (found != machine().memory.end()) found->second.kept.insert(static_cast<int>(stream.id()));
  }
  static c10::Stream as_stream(c10::Device device, int id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

struct Hooks final : at::HPUHooksInterface {
  explicit Hooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { t_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(t_device, static_cast<int>(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, Hooks);
}

namespace {

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : c10::Device(kType, t_device));
  return at::detail::empty_generic(size, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::HPU),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.has_value() && device->has_index() ? *device : c10::Device(kType, t_device));
  return at::detail::empty_strided_generic(size, stride, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::HPU),
                                           c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::Tensor from = on_host(source), to = on_host(target);
  if (t_inside) {
    to.copy_(from);
    return target;
  }
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const bool out = is_ours(source), in = is_ours(target);
  const int first = stream_of(out ? source.device().index() : target.device().index());
  const int last = in ? stream_of(target.device().index()) : first;
  if (first != last) m.wait(first, m.mark(last));  // as between two GPUs
  tick(first);
  if (out) m.use(base_of(source), first, false, "copy");
  if (in) m.use(base_of(target), first, true, "copy");
  if (first != last) m.wait(last, m.mark(first));
  if (out && in && source.device() != target.device()) ++m.crossings;
  if (out && !in && non_blocking && to.is_contiguous()) {
    const at::Tensor bytes = from.to(to.scalar_type()).contiguous();
    const auto* data = static_cast<const char*>(bytes.const_data_ptr());
    Arrival one{first,
                m.streams[first].now,
                {data, data + bytes.nbytes()},
                to.storage(),
                static_cast<std::size_t>(to.storage_offset()) * to.itemsize()};
    std::memset(to.data_ptr(), 0xFF, to.nbytes());  // NaN
    m.arrivals.push_back(std::move(one));
    return target;
  }
  to.copy_(from);
  if (out && !in) m.host_waits(m.mark(first));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar(const at::Tensor& tensor) {
  Machine& m = machine();
  {
    const std::lock_guard lock(m.mutex);
    const int stream = stream_of(tensor.device().index());
    tick(stream);
    m.use(base_of(tensor), stream, false, "item");
    m.host_waits(m.mark(stream));
  }
  return on_host(tensor).item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  const std::lock_guard lock(machine().mutex);
  const auto found = machine().memory.find(base_of(tensor));
  if (found != machine().memory.end()) found->second.kept.insert(static_cast<int>(stream.id()));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

template <class Do>
void each(const torch::jit::Stack& stack, std::size_t begin, std::size_t count, const Do& act) {
  for (std::size_t k = 0; k < count; ++k) {
    const c10::IValue& value = stack[begin + k];
    if (value.isTensor()) {
      act(value.toTensor(), k);
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorVector()) act(one, k);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        if (one.has_value()) act(*one, k);
      }
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t arguments = schema.arguments().size(), begin = stack->size() - arguments;
  std::string name = schema.name();
  std::optional<c10::Device> device;
  const bool lists = name.find("_foreach") != std::string::npos;
  each(*stack, begin, arguments, [&](const at::Tensor& one, std::size_t) {
    if (!one.defined() || (one.dim() == 0 && !is_ours(one))) return;
    if (device.has_value() && *device != one.device() && !lists && name != "aten::index" &&
        name != "aten::index_put_" && name != "aten::_index_put_impl_") {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                  " and ", one.device(), "! (", name, ")");
    }
    if (!device.has_value() || device->type() != kType) device = one.device();
  });
  Machine& m = machine();
  std::vector<void*> written;
  {
    const std::lock_guard lock(m.mutex);
    std::set<int> streams;
    each(*stack, begin, arguments, [&](const at::Tensor& one, std::size_t k) {
      if (!is_ours(one) || !one.has_storage()) return;
      const int stream = stream_of(one.device().index());
      if (streams.insert(stream).second) tick(stream);
      const auto* alias = schema.arguments()[k].alias_info();
      m.use(base_of(one), stream, alias != nullptr && alias->isWrite(), name);
    });
  }
  const c10::OptionalDeviceGuard guard(device.has_value() && device->type() == kType ? device : std::nullopt);
  const bool before = std::exchange(t_inside, true);
  struct Back {
    bool value;
    ~Back() { t_inside = value; }
  } back{before};
  at::native::cpu_fallback(op, stack, false);
}

using Optional = std::optional<at::Tensor>;

/// Writes to its statistics, which its schema does not say, so the fallback would lose that.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input, const Optional& weight,
                                                          const Optional& bias, const Optional& mean,
                                                          const Optional& variance, bool training, double momentum,
                                                          double epsilon) {
  const auto host = [](const Optional& one) { return one.has_value() ? Optional(on_host(*one)) : one; };
  const c10::DeviceGuard guard(input.device());
  {
    Machine& m = machine();
    const std::lock_guard lock(m.mutex);
    const int stream = stream_of(input.device().index());
    tick(stream);
    const std::string name = "native_batch_norm";
    for (const Optional& one : {Optional(input), weight, bias}) {
      if (one.has_value()) m.use(base_of(*one), stream, false, name);
    }
    for (const Optional& one : {mean, variance}) {
      if (one.has_value()) m.use(base_of(*one), stream, training, name);
    }
  }
  const auto [out, saved_mean, saved] = at::native_batch_norm(on_host(input), host(weight), host(bias), host(mean),
                                                              host(variance), training, momentum, epsilon);
  return {out.to(input.device()), saved_mean.to(input.device()), saved.to(input.device())};
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("native_batch_norm", &batch_norm);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
  });
  m.impl("resize_", &resize);
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());  // as the host computes it
  m.impl("set_.source_Storage", [](at::Tensor& self, c10::Storage source) -> at::Tensor& {
    return at::native::set_(self, std::move(source));
  });
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kType, &g_allocator);
  // Who holds the machine's lock may need Python's, as PyTorch takes it to drop a tensor.
  using Free = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def(
      "new_stream",
      [](int device) {
        const std::lock_guard lock(machine().mutex);
        machine().streams.push_back({device});
        return static_cast<int>(machine().streams.size()) - 1;
      },
      Free());
  m.def(
      "enter",
      [](int device, int stream) {
        t_device = device;
        t_streams[device] = stream;
      },
      Free());
  m.def("current", [](int device) { return stream_of(device); });
  m.def("device", [] { return t_device; });
  m.def(
      "record",
      [](int stream) {
        const std::lock_guard lock(machine().mutex);
        machine().events.emplace_back(stream, machine().mark(stream));
        return machine().events.size() - 1;
      },
      Free());
  m.def(
      "wait",
      [](int stream, std::size_t event) {
        const std::lock_guard lock(machine().mutex);
        machine().wait(stream, machine().events[event].second);
      },
      Free());
  m.def(
      "host_waits",
      [](std::size_t event) {
        const std::lock_guard lock(machine().mutex);
        machine().host_waits(machine().events[event].second);
      },
      Free());
  m.def("keep",
        [](at::Tensor tensor, int stream) { record_stream(tensor, Guard::as_stream(tensor.device(), stream)); });
  m.def(
      "limit",
      [](int device, std::size_t bytes) {  // 0: no limit
        const std::lock_guard lock(machine().mutex);
        machine().limit[device] = bytes;
      },
      Free());
  m.def("reset_peak", [](int device) { machine().peak[device] = machine().in_use[device]; });
  m.def("peak", [](int device) { return machine().peak[device]; });
  m.def("take_crossings", [] { return std::exchange(machine().crossings, 0); });
  m.def(
      "take_problems",
      [] {
        const std::lock_guard lock(machine().mutex);
        return std::exchange(machine().problems, {});
      },
      Free());
}
