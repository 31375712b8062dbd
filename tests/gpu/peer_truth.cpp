// SPDX-License-Identifier: Apache-2.0
#include "peer_truth.hpp"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>

#include "cuda_backend.hpp"
#include "host_path.hpp"

namespace paceline::gpu_test {
namespace {

/// One GPU, with memory of one kind, and a pattern of its own.
class Gpu {
 public:
  Gpu(const Device& device, std::size_t bytes)
      : name(device.name), index(device.index), opened(CudaBackend().open(device)), stream(opened->make_stream()) {
    begin = opened->make_event(true);
    end = opened->make_event(true);
    pattern_ = opened->allocate_pinned(bytes);
    returned_ = opened->allocate_pinned(bytes);
    bytes_ = bytes;
  }
  ~Gpu() { release(); }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  void allocate(bool pool) {
    release();
    if (pool) {
      for (auto* one : {&given, &taken}) {
        buffers_.push_back(opened->allocate(bytes_, *stream));
        *one = buffers_.back()->data();
      }
    } else {
      static_cast<void>(cudaSetDevice(index));
      for (auto* one : {&given, &taken}) {
        if (cudaMalloc(one, bytes_) != cudaSuccess) throw OutOfMemory(name + ": no memory to copy", name);
        plain_.push_back(*one);
      }
    }
  }

  /// A pattern that nobody had before.
  void write(unsigned char salt) {
    auto* const values = static_cast<unsigned char*>(pattern_->data());
    for (std::size_t k = 0; k < bytes_; ++k) values[k] = static_cast<unsigned char>(k + k / 251 + salt);
    stream->copy(given, pattern_->data(), bytes_);
    finish();
  }

  [[nodiscard]] bool has(const Gpu& source) {
    stream->copy(returned_->data(), taken, bytes_);
    finish();
    return std::memcmp(returned_->data(), source.pattern_->data(), bytes_) == 0;
  }

  void finish() {
    stream->record(*end);
    wait_for(*end, std::chrono::seconds(20));
  }

  std::string name;
  int index;
  std::unique_ptr<AsyncDevice> opened;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Event> begin, end;
  void* given = nullptr;
  void* taken = nullptr;

 private:
  void release() {
    buffers_.clear();
    for (void* one : std::exchange(plain_, {})) {
      static_cast<void>(cudaSetDevice(index));
      static_cast<void>(cudaFree(one));
    }
  }

  std::size_t bytes_ = 0;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<void*> plain_;
  std::unique_ptr<Buffer> pattern_, returned_;
};

class Truth {
 public:
  explicit Truth(std::size_t bytes) : bytes_(bytes) {
    for (const Device& device : CudaBackend().devices()) gpus_.push_back(std::make_unique<Gpu>(device, bytes));
  }

  bool print() {
    std::printf("{\"available\": true, \"bytes\": %zu, \"copies\": [", bytes_);
    for (const bool pool : {false, true}) {
      for (const auto& gpu : gpus_) gpu->allocate(pool);
      for (const auto& from : gpus_) {
        for (const auto& to : gpus_) {
          if (from == to) continue;
          for (const bool push : {false, true}) one(*from, *to, pool ? "pool" : "plain", push);
        }
      }
    }
    ring();
    for (std::size_t k = 0; k < gpus_.size(); ++k) through_host(*gpus_[k], *gpus_[(k + 1) % gpus_.size()]);
    std::printf("]}\n");
    return right_;
  }

 private:
  void row(const Gpu& from, const Gpu& to, const char* memory, const char* way, double seconds, bool right) {
    const double rate = seconds > 0.0 ? static_cast<double>(bytes_) / seconds / 1e9 : 0.0;
    std::printf(
        "%s{\"from\": \"%s\", \"to\": \"%s\", \"link\": \"%s\", \"memory\": \"%s\", \"way\": \"%s\", "
        "\"gigabytes_per_second\": %.1f, \"right\": %s}",
        separator_, from.name.c_str(), to.name.c_str(), name_of(from.opened->link_to(*to.opened)), memory, way, rate,
        right ? "true" : "false");
    separator_ = ", ";
    right_ = right_ && right;
  }

  /// The first copy may connect or map something; the second one is timed.
  void one(Gpu& from, Gpu& to, const char* memory, bool push) {
    Gpu& by = push ? from : to;
    double seconds = 0.0;
    bool right = true;
    for (int round = 0; round < 2; ++round) {
      from.write(++salt_);
      by.stream->record(*by.begin);
      by.stream->copy(to.taken, from.given, bytes_);
      by.finish();
      seconds = by.end->seconds_since(*by.begin);
      right = right && to.has(from);
    }
    row(from, to, memory, push ? "push" : "pull", seconds, right);
  }

  void ring() {
    const std::size_t count = gpus_.size();
    for (const auto& gpu : gpus_) gpu->write(++salt_);
    for (std::size_t k = 0; k < count; ++k) {
      Gpu& to = *gpus_[(k + 1) % count];
      to.stream->record(*to.begin);
      to.stream->copy(to.taken, gpus_[k]->given, bytes_);
      to.stream->record(*to.end);
    }
    for (const auto& gpu : gpus_) wait_for(*gpu->end, std::chrono::seconds(20));
    std::vector<double> seconds;
    for (const auto& gpu : gpus_) seconds.push_back(gpu->end->seconds_since(*gpu->begin));
    for (std::size_t k = 0; k < count; ++k) {
      Gpu& to = *gpus_[(k + 1) % count];
      row(*gpus_[k], to, "pool", "all at once", seconds[(k + 1) % count], to.has(*gpus_[k]));
    }
  }

  void through_host(Gpu& from, Gpu& to) {
    const auto path = cuda::HostPath::of(from.index, to.index);
    const auto begun = to.opened->make_event(false);
    double seconds = 0.0;
    bool right = true;
    for (int round = 0; round < 2; ++round) {
      from.write(++salt_);
      to.stream->record(*to.begin);
      const cuda::HostPath::Receiver receiver{to.index, to.stream.get(), begun.get(), to.taken};
      path->copy({&receiver, 1}, from.given, bytes_);
      to.finish();
      seconds = to.end->seconds_since(*to.begin);
      right = right && to.has(from);
    }
    row(from, to, "pool", "through the host", seconds, right);
  }

  std::size_t bytes_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  const char* separator_ = "";
  unsigned char salt_ = 0;
  bool right_ = true;
};

}  // namespace

bool print_peer_truth(std::size_t bytes) {
  const CudaBackend backend;
  if (const std::size_t count = backend.devices().size(); count < 2) {
    std::printf("{\"available\": false, \"why\": \"%s\"}\n",
                count == 1 ? "there is one GPU only" : backend.why_none().c_str());
    return true;
  }
  return Truth(bytes).print();
}

}  // namespace paceline::gpu_test
