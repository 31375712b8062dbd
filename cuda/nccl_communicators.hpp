// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <paceline/runtime/async_device.hpp>

#include "comm/link.hpp"
#include "nccl_library.hpp"

namespace paceline::nccl {

/// NCCL's communicators of several GPUs, blocking ones, made and ended together. Every collective is one group.
///
/// NCCL has no time-outs of its own: what was enqueued is looked after by events. Where one collective or one
/// communicator fails, all of them are aborted, which lets the GPUs go on; open() makes new ones.
/// Threads: one, the issuing thread; check() and position() any.
class Communicators {
 public:
  Communicators(const Library& library, std::vector<internal::Endpoint> endpoints, std::chrono::nanoseconds timeout);

  /// Connects the GPUs, and waits until messages up to `warm_up_bytes` have gone through.
  /// @throws Error, Timeout
  void open(std::size_t warm_up_bytes);
  [[nodiscard]] bool is_open() const noexcept { return open_.load(); }

  /// Sums, and minima and maxima of integers: NCCL drops NaNs from others.
  void all_reduce(const std::vector<void*>& buffers, std::size_t count, DType dtype, ReduceOp op);
  void reduce_scatter(const std::vector<const void*>& wholes, const std::vector<void*>& parts, std::size_t part_count,
                      DType dtype, ReduceOp op);
  void all_gather(const std::vector<void*>& buffers, std::size_t part_bytes);
  void broadcast(const std::vector<void*>& buffers, std::size_t bytes, std::size_t root);
  void reduce(const std::vector<void*>& buffers, std::size_t count, DType dtype, std::size_t root);

  /// Memory of that rank which NCCL's kernels on all GPUs may reach, registered with its communicator and with those
  /// that come after it. Null where NCCL refuses.
  [[nodiscard]] void* allocate(std::size_t rank, std::size_t bytes);
  /// Requires: no work that uses it.
  void release(void* data);

  /// Looks whether what was enqueued is done, late or broken. False: there is nothing to look after.
  bool look_after();
  /// Aborts them if the oldest of what was enqueued is still under way; why is then known to check(), if all GPUs had
  /// come to it.
  void give_up();
  /// Ends the communicators once they have nothing to do; aborts them if that takes too long.
  void close();

  /// Throws what look_after() has found, once.
  void check();
  /// "ncclAllReduce" and the rank, while the issuing thread is inside NCCL; kEveryRank if it concerns all.
  struct Position {
    const char* function = nullptr;
    std::size_t rank = kEveryRank;
  };
  static constexpr std::size_t kEveryRank = static_cast<std::size_t>(-1);
  [[nodiscard]] Position position() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A collective on its way.
  struct Operation {
    const char* function = nullptr;
    std::vector<std::unique_ptr<Event>> arrived;   // every rank's stream has come to it
    std::vector<std::unique_ptr<Event>> finished;  // and is done with it
    std::optional<Clock::time_point> started;      // when the last one was seen to have come
  };

  /// Memory of NCCL's.
  struct Segment {
    std::size_t rank = 0;
    void* data = nullptr;
    std::size_t bytes = 0;
    void* handle = nullptr;  // of its registration; null: not registered
  };

  void register_segment(Segment& segment);
  void deregister(Segment& segment);
  template <class Call>
  void group(const char* function, Call call);
  template <class Call>
  void enqueue(const char* function, Call call);
  void warm_up(std::size_t bytes);
  void await_all();
  [[nodiscard]] bool finish(Operation& operation);
  [[nodiscard]] std::size_t broken_rank();
  [[nodiscard]] std::exception_ptr error_of(Result result, const char* function, std::size_t rank) const;
  [[nodiscard]] std::exception_ptr late(const Operation& operation) const;
  void fail(std::exception_ptr failure);
  void abort() noexcept;
  void enter(const char* function, std::size_t rank);
  [[nodiscard]] std::string name_of_rank(std::size_t rank) const;

  const Library& library_;
  const std::vector<internal::Endpoint> endpoints_;
  const std::chrono::nanoseconds timeout_;
  std::vector<Comm> comms_;
  std::deque<Operation> outstanding_;
  std::vector<Operation> spare_;  // events are made once
  std::vector<Segment> segments_;
  std::atomic<bool> open_{false};

  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  Position position_;
};

}  // namespace paceline::nccl
