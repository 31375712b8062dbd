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

/// NCCL's blocking communicators of several GPUs, made and ended together. Every collective is one group.
///
/// NCCL has no time-outs of its own, so events show whether enqueued work is late. If one collective or communicator
/// fails, all communicators are aborted, which lets the GPUs go on. open() then makes new ones. Only the issuing thread
/// calls these functions, except check(), position() and name_of_rank(), which any thread may call.
class Communicators {
 public:
  Communicators(const Library& library, std::vector<internal::Endpoint> endpoints, std::chrono::nanoseconds timeout);

  /// Connects the GPUs, and waits until messages of up to `warm_up_bytes` have arrived.
  /// @throws Error, Timeout
  void open(std::size_t warm_up_bytes);
  [[nodiscard]] bool is_open() const noexcept { return open_.load(); }

  /// For sums, and for minima and maxima of integers. NCCL's minima and maxima of floating-point numbers drop NaNs.
  void all_reduce(const std::vector<void*>& buffers, std::size_t count, DType dtype, ReduceOp op);
  void reduce(const std::vector<internal::Piece>& pieces, std::size_t count, DType dtype, ReduceOp op);
  void broadcast(const std::vector<internal::Piece>& pieces, std::size_t bytes);

  /// Checks whether enqueued work is done, late or broken. False: there is nothing to look after.
  bool look_after();
  /// Aborts the communicators if the oldest collective is still under way. check() then throws the reason, if all GPUs
  /// had reached that collective.
  void give_up();
  /// Ends the communicators after their work. Aborts them if that takes too long.
  void close();

  /// Throws the failure that look_after() has found, once.
  void check();
  /// The function ("ncclAllReduce") and rank of the current NCCL call; kEveryRank if the call concerns all ranks.
  struct Position {
    const char* function = nullptr;
    std::size_t rank = kEveryRank;
  };
  static constexpr std::size_t kEveryRank = static_cast<std::size_t>(-1);
  [[nodiscard]] Position position() const;
  /// The name of a rank's device, or of all devices. Any thread.
  [[nodiscard]] std::string name_of_rank(std::size_t rank) const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A collective under way.
  struct Operation {
    const char* function = nullptr;
    std::vector<std::unique_ptr<Event>> arrived{};   // per rank: its stream has reached the collective
    std::vector<std::unique_ptr<Event>> finished{};  // per rank: its part is done
    std::optional<Clock::time_point> started{};      // when the last rank was seen to have arrived
  };

  template <class Call>
  void group(const char* function, Call call);
  template <class Call>
  void enqueue(const char* function, const std::vector<internal::Piece>& pieces, Call call);
  void warm_up(std::size_t bytes);
  void await_all();
  [[nodiscard]] bool finish(Operation& operation);
  void drop_finished();
  [[nodiscard]] std::size_t broken_rank();
  [[nodiscard]] std::exception_ptr error_of(Result result, const char* function, std::size_t rank) const;
  [[nodiscard]] std::exception_ptr late(const Operation& operation) const;
  void fail(std::exception_ptr failure);
  void abort() noexcept;
  void enter(const char* function, std::size_t rank);

  const Library& library_;
  const std::vector<internal::Endpoint> endpoints_;
  const std::chrono::nanoseconds timeout_;
  std::vector<Comm> comms_;
  std::deque<Operation> outstanding_;
  // Finished operations, whose events the next ones use. If the driver allocates while NCCL's kernels are launched,
  // both can hang. So new events are made only until there are enough.
  std::vector<Operation> spare_;
  std::atomic<bool> open_{false};

  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  Position position_;
};

}  // namespace paceline::nccl
