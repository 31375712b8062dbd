// SPDX-License-Identifier: Apache-2.0
#include "fake_cuda.hpp"

#include <atomic>
#include <numeric>

#include "driver.hpp"
#include "entry_points.hpp"
#include "machine.hpp"

namespace fake {
namespace {
std::atomic<void (*)()> release_kept{nullptr};

void release() {
  if (void (*const function)() = release_kept.load()) function();
}
}  // namespace

void set_release(void (*function)()) { release_kept = function; }

void boot(const Settings& settings) {
  release();
  const std::lock_guard lock(machine().mutex);
  forget_contexts();
  forget_loaded_kernels();
  machine().boot(settings);
}

Leftovers leftovers() {
  release();
  const std::lock_guard lock(machine().mutex);
  return machine().leftovers();
}

std::vector<std::string> problems() {
  const std::lock_guard lock(machine().mutex);
  return machine().problems;
}

std::size_t unused_pool_bytes() {
  const std::lock_guard lock(machine().mutex);
  std::size_t bytes = 0;
  for (const auto& [key, pool] : machine().pools) bytes += pool->reserved - pool->used;
  return bytes;
}

int synchronize_calls() {
  const std::lock_guard lock(machine().mutex);
  return machine().synchronize_calls;
}

int driver_staged_copies() {
  const std::lock_guard lock(machine().mutex);
  return machine().driver_staged_copies;
}

int made_events() {
  const std::lock_guard lock(machine().mutex);
  return machine().made_events;
}

int pointer_queries() {
  const std::lock_guard lock(machine().mutex);
  return machine().pointer_queries;
}

int node_of_pinned_memory() {
  const std::lock_guard lock(machine().mutex);
  return machine().node_of_pinned_memory;
}

void fail_allocation(int count) {
  const std::lock_guard lock(machine().mutex);
  machine().allocations_until_failure = count;
}

void set_before_copy(std::function<cudaError_t()> call) {
  const std::lock_guard lock(machine().mutex);
  machine().before_copy = std::move(call);
}

void fail_event(int count) {
  const std::lock_guard lock(machine().mutex);
  machine().events_until_failure = count;
}

void set_peer_copy_seconds(double seconds) {
  const std::lock_guard lock(machine().mutex);
  machine().peer_copy_seconds = seconds;
}

void set_link(int source, int target, double bytes_per_second) {
  const std::lock_guard lock(machine().mutex);
  machine().links[{source, target}] = bytes_per_second;
}

void set_memory(int device, std::size_t bytes) {
  const std::lock_guard lock(machine().mutex);
  machine().memory_of[device] = bytes;
}

void lie(int source, int target) {
  const std::lock_guard lock(machine().mutex);
  machine().lies.emplace(source, target);
}

void refuse_pool_access(int peer) {
  const std::lock_guard lock(machine().mutex);
  machine().refused_by_pools.insert(peer);
}

bool peer_access(int device, int peer) {
  const std::lock_guard lock(machine().mutex);
  return machine().peer_access.contains({device, peer});
}

void set_push(int source, int target, double bytes_per_second) {
  const std::lock_guard lock(machine().mutex);
  machine().pushes[{source, target}] = bytes_per_second;
}

std::size_t bytes_between_gpus() {
  const std::lock_guard lock(machine().mutex);
  return machine().bytes_between_gpus;
}

HostCopies host_copies() {
  const std::lock_guard lock(machine().mutex);
  return machine().host_copies;
}

void map_own(const void* data) {
  const std::lock_guard lock(machine().mutex);
  machine().find(data)->mapped = true;
}

void poison(int device, cudaError_t error) {
  const std::lock_guard lock(machine().mutex);
  machine().break_down(device, error);
}

void hang(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  machine().resolve(stream)->hung = true;
}

void go_on(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  machine().resolve(stream)->hung = false;
}

std::vector<int> sms_of(cudaStream_t stream) {
  const std::lock_guard lock(machine().mutex);
  const auto* const asked = reinterpret_cast<Stream*>(stream);
  if (!machine().known(asked)) misuse("a stream that was destroyed was asked for its SMs");
  if (asked->green != nullptr) return asked->green->sms;
  std::vector<int> all(static_cast<std::size_t>(machine().settings().multiprocessors));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Twins call these while an entry point holds the lock.
void reads(const void* data, std::size_t bytes) { machine().access(data, bytes, false); }
void writes(const void* data, std::size_t bytes) { machine().access(data, bytes, true); }
void takes(double seconds) { machine().current_cost = seconds; }

}  // namespace fake
