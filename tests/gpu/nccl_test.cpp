// SPDX-License-Identifier: Apache-2.0
//
// The NCCL that is found, with the one rank that a single GPU can be: our declarations of it, its collectives, its
// memory, and an abort. PACELINE_NCCL_LIBRARY names the file (tests/gpu/run: the one that came with PyTorch).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>

#include "nccl_library.hpp"
#include "support/boxes.hpp"

namespace paceline {
namespace {

using nccl::Comm;
using nccl::Result;

constexpr std::size_t kCount = 1 << 16;
constexpr std::size_t kBytes = kCount * sizeof(float);

// What paceline does not call, and so does not declare: nccl.h of 2.19 and newer.
using AllGather = Result(const void* send, void* receive, std::size_t count, nccl::DataType type, Comm comm,
                         cudaStream_t stream);
using ReduceScatter = Result(const void* send, void* receive, std::size_t count, nccl::DataType type,
                             nccl::ReductionOperation op, Comm comm, cudaStream_t stream);
using MemAlloc = Result(void** pointer, std::size_t bytes);
using MemFree = Result(void* pointer);
using CommRegister = Result(Comm comm, void* buffer, std::size_t bytes, void** handle);
using CommDeregister = Result(Comm comm, void* handle);

class NcclOnDevice : public gpu_test::NeedsGpu {
 protected:
  void SetUp() override {
    NeedsGpu::SetUp();
    if (IsSkipped()) return;
    try {
      nccl_ = &nccl::library();
    } catch (const Unavailable& error) {
      GTEST_SKIP() << "no NCCL: " << error.what();
    }
    RecordProperty("nccl", nccl::version_text(nccl_->version));
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    device_ = CudaBackend().open(find_device("cuda:0"));
    stream_ = device_->make_stream();
    done_ = device_->make_event(false);
    ASSERT_NO_FATAL_FAILURE(make_communicator());
  }

  void TearDown() override {
    if (comm_ != nullptr) ok(nccl_->comm_destroy(comm_));
  }

  void make_communicator() {
    nccl::UniqueId id{};
    ok(nccl_->get_unique_id(&id));
    nccl::Config config{.blocking = 1};
    in_group([&] { ok(nccl_->comm_init_rank_config(&comm_, 1, id, 0, &config)); });
    ASSERT_NE(comm_, nullptr);
  }

  void ok(Result result) const {
    EXPECT_EQ(result, nccl::kSuccess) << nccl_->get_error_string(result) << ": " << nccl_->get_last_error(comm_);
  }

  template <class Call>
  void in_group(const Call& call) const {
    ok(nccl_->group_start());
    call();
    ok(nccl_->group_end());
  }

  /// Null where this NCCL has no such function.
  template <class F>
  F* function(const char* name) const {
    void* const handle = dlopen(nccl_->path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    return handle == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(handle, name));
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_->native(); }

  /// Sends numbers through a collective from one buffer to the other: with one rank each leaves them as they are.
  template <class Collective>
  void expect_copied(const Collective& collective) {
    const auto in = device_->allocate(kBytes, *stream_);
    const auto out = device_->allocate(kBytes, *stream_);
    expect_copied(in->data(), out->data(), collective);
  }

  /// The same between memory of the caller's.
  template <class Collective>
  void expect_copied(void* in, void* out, const Collective& collective) {
    const auto before = device_->allocate_pinned(kBytes);
    const auto after = device_->allocate_pinned(kBytes);
    auto* const numbers = static_cast<float*>(before->data());
    for (std::size_t i = 0; i < kCount; ++i) numbers[i] = static_cast<float>(i % 1000) - 500.0F;
    stream_->copy(in, before->data(), kBytes);
    stream_->zero(out, kBytes);
    in_group([&] { ok(collective(in, out)); });
    stream_->copy(after->data(), out, kBytes);
    stream_->record(*done_);
    wait_for(*done_);
    const auto* const got = static_cast<const float*>(after->data());
    EXPECT_EQ(std::vector<float>(got, got + kCount), std::vector<float>(numbers, numbers + kCount));
    Result state = nccl::kSuccess;
    ok(nccl_->comm_get_async_error(comm_, &state));
    ok(state);
  }

  const nccl::Library* nccl_ = nullptr;
  Comm comm_ = nullptr;
  std::unique_ptr<AsyncDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
};

TEST_F(NcclOnDevice, RunsTheCollectivesThatPacelineCalls) {
  for (const nccl::ReductionOperation op : {nccl::kSum, nccl::kMax, nccl::kMin}) {
    SCOPED_TRACE(static_cast<int>(op));
    expect_copied(
        [&](void* in, void* out) { return nccl_->all_reduce(in, out, kCount, nccl::kFloat32, op, comm_, stream()); });
  }
  expect_copied(
      [&](void* in, void* out) { return nccl_->broadcast(in, out, kCount, nccl::kFloat32, 0, comm_, stream()); });
  expect_copied([&](void* in, void* out) {
    return nccl_->reduce(in, out, kCount, nccl::kFloat32, nccl::kSum, 0, comm_, stream());
  });
}

TEST_F(NcclOnDevice, GathersAndScatters) {
  auto* const gather = function<AllGather>("ncclAllGather");
  auto* const scatter = function<ReduceScatter>("ncclReduceScatter");
  if (gather == nullptr || scatter == nullptr) GTEST_SKIP() << "this NCCL has no ncclAllGather and ncclReduceScatter";
  expect_copied([&](void* in, void* out) { return gather(in, out, kCount, nccl::kFloat32, comm_, stream()); });
  expect_copied(
      [&](void* in, void* out) { return scatter(in, out, kCount, nccl::kFloat32, nccl::kSum, comm_, stream()); });
}

TEST_F(NcclOnDevice, ReducesInMemoryOfItsOwnThatIsRegistered) {
  auto* const allocate = function<MemAlloc>("ncclMemAlloc");
  auto* const release = function<MemFree>("ncclMemFree");
  auto* const enter = function<CommRegister>("ncclCommRegister");
  auto* const leave = function<CommDeregister>("ncclCommDeregister");
  if (allocate == nullptr || release == nullptr || enter == nullptr || leave == nullptr) {
    GTEST_SKIP() << "this NCCL has no ncclMemAlloc and ncclCommRegister";
  }
  void* memory = nullptr;
  void* handle = nullptr;
  ok(allocate(&memory, 2 * kBytes));
  ASSERT_NE(memory, nullptr);
  ok(enter(comm_, memory, 2 * kBytes, &handle));
  expect_copied(memory, static_cast<char*>(memory) + kBytes, [&](void* in, void* out) {
    return nccl_->all_reduce(in, out, kCount, nccl::kFloat32, nccl::kSum, comm_, stream());
  });
  ok(leave(comm_, handle));
  ok(release(memory));
}

TEST_F(NcclOnDevice, AbortsAndIsMadeAgain) {
  expect_copied([&](void* in, void* out) {
    return nccl_->all_reduce(in, out, kCount, nccl::kFloat32, nccl::kSum, comm_, stream());
  });
  ok(nccl_->comm_abort(comm_));
  comm_ = nullptr;
  ASSERT_NO_FATAL_FAILURE(make_communicator());
  expect_copied([&](void* in, void* out) {
    return nccl_->all_reduce(in, out, kCount, nccl::kFloat32, nccl::kSum, comm_, stream());
  });
}

}  // namespace
}  // namespace paceline
