// SPDX-License-Identifier: Apache-2.0
// The memory of the fake device of PyTorch, and which device and streams a thread is on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "fake_machine.hpp"

namespace {

// The type of a device that has no code in PyTorch itself, and whose tensors may take the place of a parameter's
// `data`, unlike PrivateUse1's.
constexpr auto kType = c10::DeviceType::HPU;
using paceline_fake::Arrival;
using paceline_fake::kDevices;
using paceline_fake::machine;
using paceline_fake::Machine;
using paceline_fake::Memory;
using paceline_fake::Seen;

thread_local int t_device = 0;
thread_local std::map<int, int> t_streams;
thread_local bool t_inside = false;  // of the fallback, which moves data by copies of its own

int stream_of(int device) {
  const auto found = t_streams.find(device);
  return found == t_streams.end() ? device : found->second;
}

std::uint64_t tick(int stream) { return ++machine().streams[stream].now; }

void* base_of(const at::Tensor& tensor) { return tensor.storage().mutable_data(); }
bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

struct Allocator final : c10::Allocator {
  static void free_memory(void* data) {
    if (data == nullptr) return;
    std::optional<pybind11::gil_scoped_release> free;
    if (PyGILState_Check() != 0) free.emplace();
    Machine& m = machine();
    const std::lock_guard lock(m.mutex);
    const auto found = m.memory.find(data);
    if (found != m.memory.end()) {
      Memory& one = found->second;
      m.in_use[m.streams[one.stream].device] -= one.bytes;
      for (const int stream : one.kept) one.uses.erase(stream);
      m.freed[one.stream].push_back(std::move(one.uses));
      m.memory.erase(found);
    }
    std::free(data);
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    Machine& m = machine();
    const std::lock_guard lock(m.mutex);
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(t_device));
    if (bytes == 0) return {nullptr, nullptr, &free_memory, device};
    if (m.limit[t_device] != 0 && m.in_use[t_device] + bytes > m.limit[t_device]) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (fake): ", bytes, " bytes on ", device);
    }
    void* data = std::malloc(bytes);
    const int stream = stream_of(t_device);
    m.reuse(stream);
    Memory one;
    one.stream = stream;
    one.written = {stream, tick(stream)};
    one.bytes = bytes;
    m.memory[data] = one;
    m.in_use[t_device] += bytes;
    m.peak[t_device] = std::max(m.peak[t_device], m.in_use[t_device]);
    return {data, data, &free_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace
