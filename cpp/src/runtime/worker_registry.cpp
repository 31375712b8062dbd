// SPDX-License-Identifier: Apache-2.0
#include "runtime/worker_registry.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <list>
#include <new>
#include <thread>
#include <tuple>
#include <utility>

#include <paceline/runtime/blocking.hpp>

#include "runtime/deadline.hpp"

namespace paceline::internal {
namespace {

std::shared_ptr<Worker> started(const Device& device) {
  auto worker = std::make_shared<Worker>(device);
  worker->start();
  return worker;
}

bool share_a_core(const Device& one, const Device& other) {
  return one.cores.empty() || other.cores.empty() ||
         std::ranges::find_first_of(one.cores, other.cores) != one.cores.end();
}

/// A GPU has one worker in the process, whatever cores groups want for it: those that the first group gives it. Host
/// devices are their cores.
bool have_one_worker(const Device& one, const Device& other) {
  const auto identity = [](const Device& device) {
    return std::tie(device.kind, device.index, device.part, device.name, device.memory_space, device.device_class,
                    device.numa_node, device.sm_count, device.fraction);
  };
  return identity(one) == identity(other) && (one.kind != DeviceKind::host || one.cores == other.cores);
}

}  // namespace

// Never destroyed, because groups may be made and closed while static objects are being destroyed. In place, because
// the end of the program may come first, when there is no memory.
WorkerRegistry& WorkerRegistry::of_process() noexcept {
  alignas(WorkerRegistry) static std::byte place[sizeof(WorkerRegistry)];
  static auto* const instance = new (place) WorkerRegistry;
  return *instance;
}

WorkerRegistry::WorkerRegistry() {
  pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                 [] {
                   WorkerRegistry& all = of_process();
                   new (&all.entries_) std::vector<Entry>;  // the old ones stay as they are: there are no such threads
                   new (&all.left_behind_) std::vector<std::shared_ptr<Worker>>;
                   all.mutex_.unlock();
                 });
}

std::shared_ptr<Worker> WorkerRegistry::join(const Device& device) {
  const std::lock_guard lock(mutex_);
  auto entry = entry_of(device);
  if (entry == entries_.end()) {
    entries_.reserve(entries_.size() + 1);
    entries_.push_back({started(device)});
    entry = entries_.end() - 1;
  } else {
    entry->worker = present(entry->worker);
  }
  ++entry->users;
  note_own_cores();
  return entry->worker;
}

std::shared_ptr<Worker> WorkerRegistry::leave(const std::shared_ptr<Worker>& first, std::uint64_t group) noexcept {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Worker> last;
  const auto entry = entry_of(first->device());
  if (--entry->users == 0) {
    last = std::move(entry->worker);
    entries_.erase(entry);
    note_own_cores();
    last->stop();
  }
  for (std::shared_ptr<Worker> one = first; one != nullptr; one = one->successor_) {
    if (!one->is_this_thread() && one->inside(group)) detach(one);
  }
  return last == nullptr || last->left_behind_ ? nullptr : last;
}

void WorkerRegistry::leave_behind(const std::shared_ptr<Worker>& worker) noexcept {
  const std::lock_guard lock(mutex_);
  detach(worker);
}

void WorkerRegistry::detach(const std::shared_ptr<Worker>& worker) noexcept {
  if (worker->left_behind_.exchange(true)) return;
  worker->thread().detach();
  try {
    std::erase_if(left_behind_, [](const auto& known) { return known->exited(); });
    left_behind_.push_back(worker);
    const auto entry = entry_of(worker->device());
    if (entry != entries_.end() && entry->worker == worker) replace_worker(*entry);
  } catch (...) {
    // no thread or no memory now: who opens the next source tries again, and what waits goes on waiting
  }
}

void WorkerRegistry::replace_worker(Entry& entry) { put_in_place(entry, started(entry.worker->device()), {}); }

void WorkerRegistry::put_in_place(Entry& entry, const std::shared_ptr<Worker>& next, std::list<Worker::Open> sources) {
  std::list<Worker::Open> waiting = entry.worker->take_waiting();
  sources.splice(sources.end(), waiting);
  for (const Worker::Open& one : sources) one.source->replace(one.device, next);
  next->open(std::move(sources), -1);
  entry.worker->stop();
  entry.worker->successor_ = next;
  entry.worker = next;
  note_own_cores();
}

bool WorkerRegistry::replace_inside(const std::shared_ptr<Worker>& first, const WorkSource& source) {
  const std::shared_ptr<Worker> worker = present(first);
  left_behind_.reserve(left_behind_.size() + 1);
  const std::shared_ptr<Worker> next = started(worker->device());
  std::list<Worker::Open> begun;
  if (!worker->hand_over(source, begun)) {
    next->stop();
    next->thread().join();
    return false;
  }
  worker->left_behind_ = true;
  worker->thread().detach();
  left_behind_.push_back(worker);
  put_in_place(*entry_of(worker->device()), next, std::move(begun));
  return true;
}

std::shared_ptr<Worker> WorkerRegistry::present(std::shared_ptr<Worker> worker) {
  while (worker->left_behind_) {
    if (worker->successor_ == nullptr) replace_worker(*entry_of(worker->device()));
    worker = worker->successor_;
  }
  return worker;
}

void WorkerRegistry::await_left_behind(std::chrono::nanoseconds timeout) noexcept {
  const auto all_exited = [this] {
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(left_behind_, [](const auto& one) { return one->exited() || one->is_this_thread(); });
  };
  const auto deadline = std::chrono::steady_clock::now() + bounded(timeout);
  const BlockingRegion region;
  while (!all_exited() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

std::vector<WorkerRegistry::Entry>::iterator WorkerRegistry::entry_of(const Device& device) noexcept {
  return std::ranges::find_if(entries_,
                              [&](const Entry& one) { return have_one_worker(one.worker->device(), device); });
}

/// A worker spins only if it takes no core from another one.
void WorkerRegistry::note_own_cores() noexcept {
  for (const Entry& one : entries_) {
    one.worker->set_own_cores(std::ranges::none_of(entries_,
                                                   [&](const Entry& other) {
                                                     return &other != &one &&
                                                            share_a_core(one.worker->device(), other.worker->device());
                                                   }) &&
                              !one.worker->device().cores.empty());
  }
}

}  // namespace paceline::internal
