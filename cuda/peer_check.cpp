// SPDX-License-Identifier: Apache-2.0
#include "peer_check.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <paceline/error.hpp>

#include "device_guard.hpp"
#include "error.hpp"
#include "stream_handle.hpp"

namespace paceline::cuda {
namespace {

constexpr std::size_t kBytes = std::size_t{64} << 10;  // sixteen pages of the host, which an IOMMU maps one by one
constexpr int kRounds = 2;                             // the second one finds bytes that are old
constexpr std::chrono::seconds kPatience{20};          // some of these paths hang

/// Pinned memory: a pattern, and what came back.
class HostMemory {
 public:
  explicit HostMemory(int device) : device_(device) {
    const DeviceGuard guard(device);
    check(cudaHostAlloc(&data_, 2 * kBytes, cudaHostAllocPortable), "pinning host memory", device);
  }
  ~HostMemory() {
    if (data_ != nullptr) destroy_on(device_, [this] { return cudaFreeHost(data_); });
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  [[nodiscard]] void* pattern() const noexcept { return data_; }
  [[nodiscard]] void* returned() const noexcept { return static_cast<char*>(data_) + kBytes; }
  /// Bytes that depend on their place and that were never written before in this process.
  void write_pattern() const {
    static std::atomic<std::uint64_t> last{0x9E3779B97F4A7C15};
    std::uint64_t state = last.fetch_add(2) | 1;
    std::vector<std::uint64_t> words(kBytes / sizeof(std::uint64_t));
    for (std::uint64_t& word : words) {  // xorshift64* (Vigna, 2016)
      state ^= state >> 12;
      state ^= state << 25;
      state ^= state >> 27;
      word = state * 0x2545F4914F6CDD1D;
    }
    std::memcpy(data_, words.data(), kBytes);
  }
  [[nodiscard]] bool same() const { return std::memcmp(pattern(), returned(), kBytes) == 0; }
  void leak() noexcept { data_ = nullptr; }

 private:
  int device_;
  void* data_ = nullptr;
};

/// Memory of one GPU, and a stream that copies.
class Side {
 public:
  Side(int device, Pool& pool)
      : device_(device),
        pool_(pool),
        stream_(device, std::shared_ptr<GreenContext>()),
        data_(pool.allocate(kBytes, stream_.get())) {}
  ~Side() {
    destroy_on(device_, [this] { return pool_.release(data_, kBytes, stream_.get()); });
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void copy(void* to, const void* from) const {
    const DeviceGuard guard(device_);
    check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream_.get()), "copying", device_);
    wait();
  }
  /// By this GPU's stream, between the memories of two.
  void copy(const Side& to, const Side& from) const {
    const DeviceGuard guard(device_);
    check(cudaMemcpyPeerAsync(to.data_, to.device_, from.data_, from.device_, kBytes, stream_.get()), "copying",
          device_);
    wait();
  }
  [[nodiscard]] void* data() const noexcept { return data_; }
  void wait() const {
    const DeviceGuard guard(device_);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      const cudaError_t error = cudaStreamQuery(stream_.get());
      if (error != cudaErrorNotReady) return check(error, "copying", device_);
      static_cast<void>(cudaGetLastError());
      if (std::chrono::steady_clock::now() > deadline) throw Timeout("a copy between GPUs does not end");
      std::this_thread::yield();
    }
  }

 private:
  int device_;
  Pool& pool_;
  StreamHandle stream_;
  void* data_;
};

bool arrives(const HostMemory& host, const Side& from, const Side& to, const Side& copier) {
  for (int round = 0; round < kRounds; ++round) {
    host.write_pattern();
    from.copy(from.data(), host.pattern());
    copier.copy(to, from);
    to.copy(host.returned(), to.data());
    if (!host.same()) return false;
  }
  return true;
}

}  // namespace

bool copies_arrive(int one, Pool& pool_of_one, int other, Pool& pool_of_other) {
  HostMemory host(one);
  const Side first(one, pool_of_one);
  const Side second(other, pool_of_other);
  first.wait();  // until its memory is there for the other stream
  second.wait();
  try {
    return arrives(host, first, second, second) && arrives(host, second, first, first) &&
           arrives(host, first, second, first) && arrives(host, second, first, second);
  } catch (const Timeout&) {
    host.leak();  // releasing it waits for the copy
    return false;
  }
}

}  // namespace paceline::cuda
