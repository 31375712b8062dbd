// SPDX-License-Identifier: Apache-2.0
#include "cuda_device.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "convert.hpp"
#include "device_guard.hpp"
#include "error.hpp"
#include "green_context.hpp"
#include "pool.hpp"
#include "reduce.hpp"
#include "routes.hpp"
#include "runtime/thread_place.hpp"
#include "stream_handle.hpp"

namespace paceline::cuda {
namespace {

class CudaEvent final : public Event {
 public:
  CudaEvent(int device, bool timed) : device_(device) {
    const DeviceGuard guard(device);
    check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming), "making an event",
          device);
  }
  /// Of the caller, who has recorded it.
  CudaEvent(int device, cudaEvent_t event) : device_(device), owned_(false), recorded_(true), event_(event) {}
  ~CudaEvent() override {
    if (owned_) destroy_on(device_, [this] { return cudaEventDestroy(event_); });
  }

  [[nodiscard]] bool done() const override {
    require_recorded();
    // The query breaks another thread's capture unless this thread is in relaxed capture mode.
    const DeviceGuard guard(device_);
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(error, "running what was enqueued", device_);
    return true;
  }

  [[nodiscard]] double seconds_since(const Event& begin) const override {
    float milliseconds = 0.0F;
    const DeviceGuard guard(device_);
    check(cudaEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(begin).event_, event_), "reading a time",
          device_);
    return 1e-3 * static_cast<double>(milliseconds);
  }

  [[nodiscard]] std::string device() const override { return fmt::format("cuda:{}", device_); }

  void record(cudaStream_t stream) {
    const DeviceGuard guard(device_);
    check(cudaEventRecord(event_, stream), "recording an event", device_);
    recorded_ = true;
  }

  /// CUDA reports an event that was never recorded as done.
  void require_recorded() const {
    if (!recorded_) throw Error(fmt::format("cuda:{}: an event that was never recorded was waited for", device_));
  }

  [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }

 private:
  int device_;
  bool owned_ = true;
  std::atomic<bool> recorded_{false};  // one thread may record while another one asks
  cudaEvent_t event_ = nullptr;
};

class CudaBuffer : public Buffer {
 public:
  CudaBuffer(int device, std::size_t bytes) : device_(device), bytes_(bytes) {}
  [[nodiscard]] void* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }

 protected:
  const int device_;
  void* data_ = nullptr;  // null without bytes

 private:
  const std::size_t bytes_;
};

class DeviceBuffer final : public CudaBuffer {
 public:
  DeviceBuffer(int device, std::shared_ptr<Pool> pool, std::shared_ptr<StreamHandle> stream, std::size_t bytes)
      : CudaBuffer(device, bytes), pool_(std::move(pool)), stream_(std::move(stream)) {
    if (bytes > 0) data_ = pool_->allocate(bytes, stream_->get());
  }
  ~DeviceBuffer() override {
    if (data_ != nullptr) destroy_on(device_, [this] { return pool_->release(data_, bytes(), stream_->get()); });
  }

 private:
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<StreamHandle> stream_;
};

class PinnedBuffer final : public CudaBuffer {
 public:
  PinnedBuffer(int device, std::size_t bytes) : CudaBuffer(device, bytes) {
    if (bytes == 0) return;
    const DeviceGuard guard(device);
    // Pages lie near the thread that touches them, and the caller's thread may run on any core.
    const internal::PreferredNode near(attribute(cudaDevAttrHostNumaId, device, -1));
    const cudaError_t error = cudaHostAlloc(&data_, bytes, cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      throw OutOfMemory(
          fmt::format("host: {} bytes of pinned memory cannot be had. The system limits how much memory "
                      "may be locked; use a smaller batch, or raise the limit.",
                      bytes));
    }
    check(error, "pinning host memory", device);
  }
  ~PinnedBuffer() override {
    // On a thread without a context the runtime would make one for GPU 0.
    if (data_ != nullptr) destroy_on(device_, [this] { return cudaFreeHost(data_); });
  }
};

static_assert(DType::float32 == DType{0} && DType::float64 == DType{1} && DType::float16 == DType{2} &&
              DType::bfloat16 == DType{3} && DType::int32 == DType{4} && DType::int64 == DType{5});
/// In the order of DType.
void (*const kKernels[])(ReductionArguments) = {&paceline_reduce_float32, &paceline_reduce_float64,
                                                &paceline_reduce_float16, &paceline_reduce_bfloat16,
                                                &paceline_reduce_int32,   &paceline_reduce_int64};

struct Conversion {
  DType to;
  DType from;
  void (*kernel)(ConversionArguments);
};
const Conversion kConversions[] = {{DType::float16, DType::float32, &paceline_to_float16},
                                   {DType::bfloat16, DType::float32, &paceline_to_bfloat16},
                                   {DType::float32, DType::float16, &paceline_from_float16},
                                   {DType::float32, DType::bfloat16, &paceline_from_bfloat16}};

/// All of them, the conversions last.
constexpr std::size_t kKernelCount = std::size(kKernels) + std::size(kConversions);
const void* kernel_at(std::size_t k) {
  return k < std::size(kKernels) ? reinterpret_cast<const void*>(kKernels[k])
                                 : reinterpret_cast<const void*>(kConversions[k - std::size(kKernels)].kernel);
}

/// The kernels on one device, loaded now. Loading at the first launch can wait for a running kernel, which
/// may wait for us.
class Kernels {
 public:
  Kernels(int device, int sm_count) {
    const DeviceGuard guard(device);
    for (std::size_t k = 0; k < kKernelCount; ++k) {
      const void* const kernel = kernel_at(k);
      cudaFuncAttributes attributes{};
      int blocks = 0;
      check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel", device);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kReductionBlock, 0), "asking for occupancy",
            device);
      most_blocks_[k] = static_cast<std::size_t>(std::max(1, blocks * sm_count));
    }
  }

  /// The blocks that run at once on the device's SMs.
  [[nodiscard]] std::size_t most_blocks(std::size_t kernel) const { return most_blocks_[kernel]; }

 private:
  std::size_t most_blocks_[kKernelCount] = {};
};

class CudaStream final : public Stream {
 public:
  CudaStream(int device, std::shared_ptr<StreamHandle> handle, std::shared_ptr<Routes> routes,
             std::shared_ptr<const Kernels> kernels)
      : device_(device), handle_(std::move(handle)), routes_(std::move(routes)), kernels_(std::move(kernels)) {}

  [[nodiscard]] NativeStream native() const noexcept override { return handle_->get(); }
  [[nodiscard]] const std::shared_ptr<StreamHandle>& handle() const noexcept { return handle_; }

  void record(Event& event) override { static_cast<CudaEvent&>(event).record(handle_->get()); }

  void wait(const Event& event) override {
    const auto& awaited = static_cast<const CudaEvent&>(event);
    awaited.require_recorded();
    const DeviceGuard guard(device_);
    check(cudaStreamWaitEvent(handle_->get(), awaited.get(), cudaEventWaitDefault), "waiting for an event", device_);
  }

  void zero(void* data, std::size_t bytes) override {
    if (bytes == 0) return;
    const DeviceGuard guard(device_);
    check(cudaMemsetAsync(data, 0, bytes, handle_->get()), "zeroing memory", device_);
  }

  /// A place is the number of a GPU.
  [[nodiscard]] MemoryPlace place_of(const void* data) const override {
    cudaPointerAttributes attributes{};
    const DeviceGuard guard(device_);
    check(cudaPointerGetAttributes(&attributes, data), "asking whose memory it is", device_);
    return attributes.type == cudaMemoryTypeDevice ? MemoryPlace{attributes.device} : MemoryPlace::host;
  }

  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) copy(to, place_of(to), from, place_of(from), bytes);
  }

  void copy(void* to, MemoryPlace to_place, const void* from, MemoryPlace from_place, std::size_t bytes) override {
    if (bytes == 0) return;
    const DeviceGuard guard(device_);
    const int target = static_cast<int>(to_place), source = static_cast<int>(from_place);
    const bool on_host = target < 0 || source < 0;
    const bool direct = on_host || routes_->direct(source, target);
    if (on_host || (direct && target == source)) {
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle_->get()), "copying", device_);
    } else if (direct) {
      if (source != device_ && routes_->pushed(source, target)) {
        return routes_->by_source(source, target).copy(*this, begun(), to, from, bytes);
      }
      // This call works for all memory. Some that PyTorch allocates is not mapped on the peer; the driver copies that.
      check(cudaMemcpyPeerAsync(to, target, from, source, bytes, handle_->get()), "copying", device_);
    } else {
      const HostPath::Receiver receiver = receiver_at(to, target);
      routes_->through_host(source, target).copy({&receiver, 1}, from, bytes);
    }
  }

  /// A copy through the host to this memory, in the order of this stream.
  [[nodiscard]] HostPath::Receiver receiver_at(void* to, int target) { return {target, this, &begun(), to}; }

  void reduce(const DeviceReduction& reduction) override;
  void convert(void* to, DType to_type, const void* from, DType from_type, std::size_t count) override;

 private:
  void launch(std::size_t kernel, std::size_t packs, void* arguments, const char* what);
  [[nodiscard]] Event& begun() {
    if (begun_ == nullptr) begun_ = std::make_unique<CudaEvent>(device_, false);
    return *begun_;
  }

  int device_;
  std::shared_ptr<StreamHandle> handle_;
  std::shared_ptr<Routes> routes_;
  std::shared_ptr<const Kernels> kernels_;
  std::unique_ptr<CudaEvent> begun_;  // of a copy on other streams
};

void CudaStream::reduce(const DeviceReduction& reduction) {
  const std::size_t input_count = reduction.inputs.size();
  if (input_count == 0 || input_count > static_cast<std::size_t>(kMaxReductionInputs)) {
    throw InvalidArgument(fmt::format("reduce: {} inputs; 1 to {} can be reduced.", input_count, kMaxReductionInputs));
  }
  const auto type = static_cast<std::size_t>(reduction.dtype);
  if (type >= std::size(kKernels))
    throw InvalidArgument(fmt::format("reduce: there is no element type of number {}.", type));
  if (reduction.count == 0) return;
  ReductionArguments arguments{};
  std::copy(reduction.inputs.begin(), reduction.inputs.end(), arguments.inputs);
  arguments.input_count = static_cast<int>(input_count);
  arguments.op = reduction.op;
  arguments.output = reduction.output;
  arguments.count = reduction.count;
  arguments.scale = reduction.scale;
  arguments.divisor = static_cast<std::int64_t>(reduction.divisor == 0 ? input_count : reduction.divisor);
  launch(type, reduction.count * size_of(reduction.dtype) / 16 + 1, &arguments, "reducing");
}

void CudaStream::convert(void* to, DType to_type, const void* from, DType from_type, std::size_t count) {
  const auto* const found = std::ranges::find_if(
      kConversions, [&](const Conversion& one) { return one.to == to_type && one.from == from_type; });
  if (found == std::end(kConversions)) {
    throw InvalidArgument(fmt::format("convert: from {} to {}; it converts between float32 and float16 or bfloat16.",
                                      name_of(from_type), name_of(to_type)));
  }
  if (count == 0) return;
  ConversionArguments arguments{to, from, count};
  const auto kernel = std::size(kKernels) + static_cast<std::size_t>(found - std::begin(kConversions));
  launch(kernel, count / 4 + 1, &arguments, "converting");
}

/// One thread for each pack of elements, up to as many as run at once. The kernels loop over the rest.
void CudaStream::launch(std::size_t kernel, std::size_t packs, void* arguments, const char* what) {
  constexpr unsigned int block = kReductionBlock;
  const auto grid = static_cast<unsigned int>(std::min(kernels_->most_blocks(kernel), (packs + block - 1) / block));
  const DeviceGuard guard(device_);
  check(cudaLaunchKernel(kernel_at(kernel), dim3(grid), dim3(block), &arguments, 0, handle_->get()), what, device_);
}

class CudaDevice final : public AsyncDevice {
 public:
  CudaDevice(int ordinal, std::shared_ptr<GreenContext> part)
      : ordinal_(ordinal),
        part_(std::move(part)),
        pool_(Pool::of(ordinal)),
        routes_(std::make_shared<Routes>(ordinal, pool_)),
        kernels_(std::make_shared<Kernels>(
            ordinal, part_ != nullptr ? part_->sm_count() : attribute(cudaDevAttrMultiProcessorCount, ordinal, 1))) {}

  std::unique_ptr<Stream> make_stream() override {
    return std::make_unique<CudaStream>(ordinal_, std::make_shared<StreamHandle>(ordinal_, part_), routes_, kernels_);
  }
  std::unique_ptr<Stream> adopt_stream(NativeStream native) override {
    // Null means the same stream, but it would look like a forgotten stream.
    cudaStream_t stream = native == nullptr ? cudaStreamLegacy : native;
    return std::make_unique<CudaStream>(ordinal_, std::make_shared<StreamHandle>(ordinal_, stream), routes_, kernels_);
  }
  std::unique_ptr<Event> make_event(bool timed) override { return std::make_unique<CudaEvent>(ordinal_, timed); }
  std::unique_ptr<Event> adopt_event(NativeEvent native) override {
    return std::make_unique<CudaEvent>(ordinal_, native);
  }
  std::unique_ptr<Buffer> allocate(std::size_t bytes, Stream& stream) override {
    return std::make_unique<DeviceBuffer>(ordinal_, pool_, static_cast<CudaStream&>(stream).handle(), bytes);
  }
  [[nodiscard]] MemoryPlace place() const noexcept override { return MemoryPlace{ordinal_}; }
  void copy_to_all(std::span<const Receiver> receivers, const void* from, std::size_t bytes) override {
    if (bytes == 0 || receivers.empty()) return;
    const MemoryPlace here = receivers.front().stream->place_of(from);
    std::vector<HostPath::Receiver> through_host;
    for (const Receiver& one : receivers) {
      const MemoryPlace there = one.stream->place_of(one.to);
      const int target = static_cast<int>(there);
      if (here != place() || target < 0 || routes_->direct(ordinal_, target)) {
        one.stream->copy(one.to, there, from, here, bytes);
      } else {
        through_host.push_back(static_cast<CudaStream*>(one.stream)->receiver_at(one.to, target));
      }
    }
    if (through_host.empty()) return;
    const int target = through_host.size() == 1 ? through_host.front().target : HostPath::kAll;
    routes_->through_host(ordinal_, target).copy(through_host, from, bytes);
  }
  std::unique_ptr<Buffer> allocate_pinned(std::size_t bytes) override {
    return std::make_unique<PinnedBuffer>(ordinal_, bytes);
  }
  void release_memory() override { pool_->trim(); }
  [[nodiscard]] std::size_t peak_bytes() const override { return pool_->peak_bytes(); }
  [[nodiscard]] bool accesses(const AsyncDevice& other) const override {
    return routes_->direct(ordinal_, static_cast<const CudaDevice&>(other).ordinal_);
  }
  bool push_to(const AsyncDevice& other, bool on) override {
    return routes_->push(ordinal_, static_cast<const CudaDevice&>(other).ordinal_, on);
  }
  [[nodiscard]] LinkKind link_to(const AsyncDevice& other) const override {
    const int peer = static_cast<const CudaDevice&>(other).ordinal_;
    if (routes_->wrong(ordinal_, peer)) return LinkKind::wrong_peer;
    if (!accesses(other)) return LinkKind::through_host;
    int native_atomics = 0;
    if (cudaDeviceGetP2PAttribute(&native_atomics, cudaDevP2PAttrNativeAtomicSupported, ordinal_, peer) !=
        cudaSuccess) {
      static_cast<void>(cudaGetLastError());  // it only has no name then
    }
    return native_atomics != 0 ? LinkKind::nvlink : LinkKind::pcie_peer;
  }
  [[nodiscard]] bool shares(const void* data) const override { return pool_->shares(data); }

 private:
  int ordinal_;
  std::shared_ptr<GreenContext> part_;
  std::shared_ptr<Pool> pool_;
  std::shared_ptr<Routes> routes_;
  std::shared_ptr<const Kernels> kernels_;
};

}  // namespace

std::unique_ptr<AsyncDevice> open_device(int ordinal, std::shared_ptr<GreenContext> part) {
  return std::make_unique<CudaDevice>(ordinal, std::move(part));
}

}  // namespace paceline::cuda
