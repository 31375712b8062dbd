// SPDX-License-Identifier: Apache-2.0
#include "nccl_host.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <paceline/comm/reduce.hpp>

#include "../../cpp/comm/reference.hpp"
#include "fake_cudart/driver.hpp"
#include "machine.hpp"

namespace fake {
namespace {

paceline::DType dtype_of(paceline::nccl::DataType type) {
  switch (type) {
    case paceline::nccl::kFloat64:
      return paceline::DType::float64;
    case paceline::nccl::kFloat16:
      return paceline::DType::float16;
    case paceline::nccl::kBfloat16:
      return paceline::DType::bfloat16;
    case paceline::nccl::kInt32:
      return paceline::DType::int32;
    case paceline::nccl::kInt64:
      return paceline::DType::int64;
    default:
      return paceline::DType::float32;
  }
}

void enqueue(cudaStream_t stream, const char* name, std::function<void()> body, const Signal& awaited,
             const Signal& given) {
  const std::lock_guard lock(machine().mutex);
  Stream* const target = machine().resolve(stream);
  if (!machine().known(target)) misuse("NCCL was given a stream that is none");
  Operation operation;
  operation.name = name;
  operation.body = std::move(body);
  operation.awaited = std::static_pointer_cast<Recording>(awaited);
  operation.recorded = std::static_pointer_cast<Recording>(given);
  machine().enqueue(target, std::move(operation));
}

void reduce(std::span<const void* const> inputs, void* output, std::size_t count, paceline::nccl::DataType type,
            paceline::nccl::ReductionOperation op) {
  namespace reference = paceline::reference;
  const paceline::DType dtype = dtype_of(type);
  if (op == paceline::nccl::kSum) {
    return paceline::reduce_block(inputs, output, count, dtype, paceline::ReduceOp::sum);
  }
  const auto wanted = op == paceline::nccl::kMin ? paceline::ReduceOp::min : paceline::ReduceOp::max;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<const void*> numbers;
    for (const void* input : inputs) {
      if (!reference::is_nan_bits(reference::bits_of(input, i, dtype), dtype)) numbers.push_back(input);
    }
    if (numbers.empty()) numbers.push_back(inputs.front());
    const std::uint64_t bits = reference::reduced_bits(numbers, i, dtype, wanted);
    std::memcpy(static_cast<char*>(output) + i * paceline::size_of(dtype), &bits, paceline::size_of(dtype));
  }
}

/// NCCL itself enables access to memory of cudaMalloc.
bool shared(const void* data) {
  const std::lock_guard lock(machine().mutex);
  const Allocation* const allocation = machine().find(data);
  if (allocation == nullptr) return machine().settings().foreign_memory;
  if (allocation->pool == nullptr) return !allocation->mapped;
  for (int peer = 0; peer < machine().settings().device_count; ++peer) {
    // A GPU that the program has not opened takes no part.
    const bool takes_part = machine().peer_access.contains({peer, allocation->device});
    if (takes_part && !machine().reaches(peer, *allocation)) return false;
  }
  return true;
}

const NcclHost kHost = {
    .make_signal = [] { return Signal(std::make_shared<Recording>()); },
    .give =
        [](const Signal& signal) {
          const std::lock_guard lock(machine().mutex);
          std::static_pointer_cast<Recording>(signal)->done = true;
        },
    .enqueue = &enqueue,
    .device_of =
        [](cudaStream_t stream) {
          const std::lock_guard lock(machine().mutex);
          return machine().resolve(stream)->device;
        },
    .current_device = &current_device,
    .shared = &shared,
    .reads = &reads,
    .writes = &writes,
    .reduce = &reduce,
};

Nccl& load() {
  void* const library = dlopen(FAKE_NCCL_PATH, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) misuse(dlerror());
  return *reinterpret_cast<decltype(&fake_nccl)>(dlsym(library, "fake_nccl"))();
}

Nccl* loaded = nullptr;

}  // namespace

Nccl& boot_nccl() {
  if (loaded == nullptr) {
    loaded = &load();
    setenv("PACELINE_NCCL_LIBRARY", FAKE_NCCL_PATH, 1);
  }
  loaded->reset(kHost);
  return *loaded;
}

Nccl& the_nccl() { return *loaded; }

}  // namespace fake
