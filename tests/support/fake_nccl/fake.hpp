// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_nccl.hpp"

namespace paceline::nccl {

/// One rank. Communicators with the same id belong together.
struct Communicator {
  int rank = 0;
  int count = 0;
  int device = 0;
  int id = 0;
  std::thread::id thread;
  Result error = kSuccess;
};

}  // namespace paceline::nccl

namespace fake {

using namespace paceline::nccl;

struct Call {
  const char* function;
  const void* send;
  void* receive;
  std::size_t count;
  DataType type;
  int giver;  // -1: all ranks give
  int taker;  // -1: all ranks take
  Comm comm;
  cudaStream_t stream;
  ReductionOperation op = kSum;
};

/// One collective over all its ranks. The streams change it under the fake CUDA's lock.
struct Collective {
  std::vector<Call> calls;  // by rank
  std::vector<std::vector<std::byte>> given;
  std::vector<Signal> arrived;
  Signal end;  // ends a hang
  std::atomic<bool> aborted{false};
};

struct Fault {
  std::string function;
  int rank;
  Result result = kSuccess;
  std::chrono::milliseconds delay{0};
  bool held = false;
};

/// What one thread has called since its outermost ncclGroupStart.
struct Group {
  int depth = 0;
  Result error = kSuccess;
  std::vector<std::pair<int, int>> inits;  // id and number of ranks
  std::vector<Call> calls;
};

/// The NCCL of one process. Every entry point locks.
class Fake final : public Nccl {
 public:
  void reset(const NcclHost& host) override;
  void set_version(int version) override;
  void fail(const std::string& function, int rank, Result result) override { add({function, rank, result}); }
  void delay(const std::string& function, int rank, std::chrono::milliseconds time) override {
    add({function, rank, kSuccess, time});
  }
  void hold(const std::string& function, int rank) override {
    add({function, rank, kSuccess, std::chrono::milliseconds(0), true});
  }
  void release() override;
  void hang(const std::string& function) override;
  void break_rank(int rank, Result result) override;
  int communicators() const override { return of(&Fake::comms_size); }
  int made() const override {
    return of([](const Fake& f) { return f.made_; });
  }
  int aborted() const override {
    return of([](const Fake& f) { return f.aborted_; });
  }
  int inside() const override {
    return of([](const Fake& f) { return f.inside_; });
  }
  bool used(const void* data, std::size_t bytes) const override;
  int calls(const std::string& function) const override;
  std::vector<std::string> problems() const override;

  // NCCL's entry points.
  Result get_version(int* version);
  Result get_unique_id(UniqueId* id);
  Result init(Comm* comm, int count, const UniqueId& id, int rank, const Config* config);
  /// Both ncclCommDestroy and ncclCommAbort.
  Result end_of(Comm comm, const char* function);
  Result async_error(Comm comm, Result* error);
  Result group_start();
  Result group_end();
  Result collective(const Call& wanted);

 private:
  void add(Fault fault);
  int comms_size() const { return static_cast<int>(comms_.size()); }
  template <class F>
  int of(F f) const {
    const std::lock_guard lock(mutex_);
    return std::invoke(f, *this);
  }
  void complain(std::string problem) { problems_.push_back(std::move(problem)); }
  Group& group() { return groups_[std::this_thread::get_id()]; }
  template <class Body>
  Result call(const char* function, Comm comm, Body body);
  void launch(std::vector<Call> calls);
  void launch(const std::shared_ptr<Collective>& made, std::size_t rank);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  NcclHost host_{};
  int version_ = 23007;
  int ids_ = 0;
  std::vector<Fault> faults_;
  std::vector<std::unique_ptr<Communicator>> comms_;
  std::map<std::thread::id, Group> groups_;
  std::vector<std::shared_ptr<Collective>> under_way_;
  std::vector<std::string> problems_;
  bool hang_ = false;
  std::string hanging_;  // the collective that hangs; empty: any
  bool released_ = false;
  int made_ = 0;
  int aborted_ = 0;
  int inside_ = 0;
  std::set<const std::byte*> used_;
  std::map<std::string, int> counts_;
};

Fake& instance();

/// Applies the faults that tests have set, then runs the body under the lock.
template <class Body>
Result Fake::call(const char* function, Comm comm, Body body) {
  std::unique_lock lock(mutex_);
  ++inside_;
  ++counts_[function];
  if (comm != nullptr && comm->thread != std::this_thread::get_id()) {
    complain(std::string(function) + " was called by a second thread");
  }
  const int rank = comm == nullptr ? kAnyRank : comm->rank;
  const auto fault = std::find_if(faults_.begin(), faults_.end(), [&](const Fault& f) {
    return f.function == function && (f.rank == kAnyRank || f.rank == rank);
  });
  Result result = kSuccess;
  if (fault != faults_.end()) {
    const Fault found = *fault;
    faults_.erase(fault);
    if (found.delay.count() > 0) {
      lock.unlock();
      std::this_thread::sleep_for(found.delay);
      lock.lock();
    }
    if (found.held) changed_.wait(lock, [&] { return released_; });
    result = found.result;
    if (result != kSuccess && std::string(function) == "ncclGroupEnd") group() = {};
  }
  if (result == kSuccess) result = body();
  if (result != kSuccess && group().depth > 0) group().error = result;
  --inside_;
  return result;
}

}  // namespace fake
