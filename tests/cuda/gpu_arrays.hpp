// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"

namespace paceline {

// Kernels of the user: their addresses are all that a launch needs here.
struct FillWork {
  float* data;
  const float* values;
  std::size_t count;
};
struct ReadWork {
  const float* data;
  float* values;
  std::size_t count;
};
inline void fill_kernel(FillWork) {}
inline void read_kernel(ReadWork) {}

inline void set_user_twins() {
  fake::twin(&fill_kernel, [](const fake::Launch&, const FillWork& work) {
    fake::writes(work.data, work.count * sizeof(float));
    std::memcpy(work.data, work.values, work.count * sizeof(float));
  });
  fake::twin(&read_kernel, [](const fake::Launch&, const ReadWork& work) {
    fake::reads(work.data, work.count * sizeof(float));
    std::memcpy(work.values, work.data, work.count * sizeof(float));
  });
}

/// Who allocates an array: paceline; the program by cudaMalloc, as PyTorch does; the program as PyTorch does with
/// expandable segments, or with a pool of its own, where peers have no access.
enum class Owner { paceline, program, mapping, pool };

/// Memory of the program's own.
class OwnBuffer final : public Buffer {
 public:
  OwnBuffer(int device, std::size_t bytes, Owner owner, cudaStream_t stream)
      : device_(device), bytes_(bytes), stream_(stream) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    if (owner == Owner::pool) {
      cudaMemPoolProps properties{};
      properties.location.id = device;
      EXPECT_EQ(cudaMemPoolCreate(&pool_, &properties), cudaSuccess);
      EXPECT_EQ(cudaMallocFromPoolAsync(&data_, bytes, pool_, stream), cudaSuccess);
    } else {
      EXPECT_EQ(cudaMalloc(&data_, bytes), cudaSuccess);
      if (owner == Owner::mapping) fake::map_own(data_);
    }
  }
  ~OwnBuffer() override {
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(pool_ == nullptr ? cudaFree(data_) : cudaFreeAsync(data_, stream_), cudaSuccess);
    if (pool_ != nullptr) {
      EXPECT_EQ(cudaMemPoolDestroy(pool_), cudaSuccess);
    }
  }
  [[nodiscard]] void* data() const noexcept override { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }

 private:
  int device_;
  std::size_t bytes_;
  cudaStream_t stream_;
  cudaMemPool_t pool_ = nullptr;
  void* data_ = nullptr;
};

/// One array per device, used as somebody would who never waits: written by a kernel on a stream of its device and read
/// by another one there. Host devices' arrays are ordinary memory.
class GpuArrays {
 public:
  GpuArrays(const DeviceGroup& group, std::size_t count, Owner owner = Owner::paceline) : count_(count) {
    for (const Device& device : group.devices()) {
      Array& array = arrays_.emplace_back();
      array.index = device.index;
      array.device = backend_of(device).open(device);
      array.host.resize(count);
      array.read.resize(count);
      array.data = array.host.data();
      if (array.device == nullptr) continue;
      array.stream = array.device->make_stream();
      const std::size_t bytes = count * sizeof(float) + kOffset;
      if (owner == Owner::paceline) {
        array.memory = array.device->allocate(bytes, *array.stream);
      } else {
        array.memory = std::make_unique<OwnBuffer>(device.index, bytes, owner, array.stream->native());
      }
      array.data = reinterpret_cast<float*>(static_cast<char*>(array.memory->data()) + kOffset);
    }
  }

  [[nodiscard]] std::vector<BufferView> views() const {
    std::vector<BufferView> all;
    for (const Array& array : arrays_) all.push_back({array.data, count_, DType::float32, native(array)});
    return all;
  }

  /// Enqueues it: `values` must stay until it has run.
  void fill(std::size_t device, const std::vector<float>& values) {
    Array& array = arrays_[device];
    if (array.stream == nullptr) {
      array.host = values;
      array.data = array.host.data();
      return;
    }
    FillWork work{array.data, values.data(), count_};
    void* arguments[] = {&work};
    launch(array, reinterpret_cast<const void*>(&fill_kernel), arguments);
  }

  /// Enqueues the reading; the values are there once wait() has come back.
  void read(std::size_t device, std::vector<float>& values) {
    Array& array = arrays_[device];
    values.assign(count_, std::nanf(""));
    if (array.stream == nullptr) {
      values = array.host;
      return;
    }
    ReadWork work{array.data, values.data(), count_};
    void* arguments[] = {&work};
    launch(array, reinterpret_cast<const void*>(&read_kernel), arguments);
  }

  void wait() {
    for (const Array& array : arrays_) {
      if (array.stream == nullptr) continue;
      const std::unique_ptr<Event> event = array.device->make_event(false);
      array.stream->record(*event);
      wait_for(*event);
    }
  }

 private:
  static constexpr std::size_t kOffset = 4;  // aligned as a float, no better

  struct Array {
    int index = 0;
    std::unique_ptr<AsyncDevice> device;
    std::unique_ptr<Stream> stream;
    std::unique_ptr<Buffer> memory;
    std::vector<float> host;
    std::vector<float> read;
    float* data = nullptr;
  };

  [[nodiscard]] static NativeStream native(const Array& array) {
    return array.stream == nullptr ? nullptr : array.stream->native();
  }

  static void launch(const Array& array, const void* kernel, void** arguments) {
    EXPECT_EQ(cudaSetDevice(array.index), cudaSuccess);
    EXPECT_EQ(cudaLaunchKernel(kernel, dim3(1), dim3(1), arguments, 0, native(array)), cudaSuccess);
  }

  std::size_t count_;
  std::vector<Array> arrays_;
};

}  // namespace paceline
