// SPDX-License-Identifier: Apache-2.0
#include "nccl_communicators.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <thread>
#include <utility>

#include <paceline/error.hpp>

#include "device_guard.hpp"
#include "error.hpp"

namespace paceline::nccl {
namespace {

DataType type_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return kFloat32;
    case DType::float64:
      return kFloat64;
    case DType::float16:
      return kFloat16;
    case DType::bfloat16:
      return kBfloat16;
    case DType::int32:
      return kInt32;
    case DType::int64:
      return kInt64;
  }
  throw InvalidArgument(fmt::format("NCCL: there is no element type of number {}.", static_cast<int>(dtype)));
}

ReductionOperation operation_of(ReduceOp op) {
  if (op == ReduceOp::min) return kMin;
  return op == ReduceOp::max ? kMax : kSum;
}

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Communicators::Communicators(const Library& library, std::vector<internal::Endpoint> endpoints,
                             std::chrono::nanoseconds timeout)
    : library_(library), endpoints_(std::move(endpoints)), timeout_(timeout), comms_(endpoints_.size(), nullptr) {}

void Communicators::open(std::size_t warm_up_bytes) {
  if (open_) return;
  UniqueId id{};
  enter("ncclGetUniqueId", kEveryRank);
  const Result result = library_.get_unique_id(&id);
  enter(nullptr, kEveryRank);
  if (result != kSuccess) std::rethrow_exception(error_of(result, "ncclGetUniqueId", kEveryRank));
  std::vector<Config> configs(endpoints_.size());
  group("ncclCommInitRankConfig", [&](std::size_t r) {
    const cuda::DeviceGuard guard(endpoints_[r].device.index);
    configs[r].blocking = 1;  // non-blocking ones may return from a group before its kernels are enqueued
    return library_.comm_init_rank_config(&comms_[r], static_cast<int>(endpoints_.size()), id, static_cast<int>(r),
                                          &configs[r]);
  });
  open_ = true;
  warm_up(warm_up_bytes);
}

/// With the first message of a kind and size NCCL connects the GPUs and loads kernels. Both can wait for a running
/// kernel, which may wait for them. So this must not happen in the middle of work.
void Communicators::warm_up(std::size_t bytes) {
  constexpr std::size_t small = 4096;
  if (bytes == 0) return;
  std::vector<std::unique_ptr<Buffer>> memory;
  internal::Piece piece;
  for (const internal::Endpoint& endpoint : endpoints_) {
    memory.push_back(endpoint.opened->allocate(bytes, *endpoint.stream));
    piece.at.push_back(memory.back()->data());
    endpoint.stream->zero(piece.at.back(), bytes);
  }
  for (const std::size_t size : {std::min(small, bytes), bytes}) {
    all_reduce(piece.at, size / sizeof(float), DType::float32, ReduceOp::sum);
    broadcast({piece}, size);
    reduce({piece}, size / sizeof(float), DType::float32, ReduceOp::sum);
  }
  await_all();
}

void Communicators::all_reduce(const std::vector<void*>& buffers, std::size_t count, DType dtype, ReduceOp op) {
  enqueue("ncclAllReduce", {{buffers}}, [&](const internal::Piece& piece, std::size_t r, cudaStream_t stream) {
    return library_.all_reduce(piece.at[r], piece.at[r], count, type_of(dtype), operation_of(op), comms_[r], stream);
  });
}

void Communicators::reduce(const std::vector<internal::Piece>& pieces, std::size_t count, DType dtype, ReduceOp op) {
  enqueue("ncclReduce", pieces, [&](const internal::Piece& piece, std::size_t r, cudaStream_t stream) {
    return library_.reduce(piece.at[r], piece.at[r], count, type_of(dtype), operation_of(op),
                           static_cast<int>(piece.root), comms_[r], stream);
  });
}

void Communicators::broadcast(const std::vector<internal::Piece>& pieces, std::size_t bytes) {
  enqueue("ncclBroadcast", pieces, [&](const internal::Piece& piece, std::size_t r, cudaStream_t stream) {
    return library_.broadcast(piece.at[r], piece.at[r], bytes, kInt8, static_cast<int>(piece.root), comms_[r], stream);
  });
}

/// Enqueues `call` for every piece and rank, as one group.
template <class Call>
void Communicators::enqueue(const char* function, const std::vector<internal::Piece>& pieces, Call call) {
  if (!open_) {  // just aborted
    check();     // throws the reason, unless it was thrown before
    throw Error(
        fmt::format("{}: {}: all connections were given up after an earlier failure. The next call makes new ones.",
                    name_of_rank(kEveryRank), function));
  }
  Operation operation;
  if (!spare_.empty()) {
    operation = std::move(spare_.back());
    spare_.pop_back();
  } else {
    for (const internal::Endpoint& endpoint : endpoints_) {
      operation.arrived.push_back(endpoint.opened->make_event(false));
      operation.finished.push_back(endpoint.opened->make_event(false));
    }
  }
  operation.function = function;
  operation.started.reset();
  for (std::size_t r = 0; r < endpoints_.size(); ++r) endpoints_[r].stream->record(*operation.arrived[r]);
  group(function, [&](std::size_t r) {
    Result result = kSuccess;
    for (auto piece = pieces.begin(); piece != pieces.end() && result == kSuccess; ++piece) {
      result = call(*piece, r, endpoints_[r].stream->native());
    }
    return result;
  });
  for (std::size_t r = 0; r < endpoints_.size(); ++r) endpoints_[r].stream->record(*operation.finished[r]);
  outstanding_.push_back(std::move(operation));
}

/// Calls `call` for every rank between ncclGroupStart and ncclGroupEnd. ncclGroupEnd must follow an error, too. After
/// an error the communicators are unusable.
template <class Call>
void Communicators::group(const char* function, Call call) {
  enter("ncclGroupStart", kEveryRank);
  Result result = library_.group_start();
  const char* failed = "ncclGroupStart";
  std::size_t rank = kEveryRank;
  std::exception_ptr error;
  if (result == kSuccess) {
    for (std::size_t r = 0; r < endpoints_.size() && result == kSuccess && error == nullptr; ++r) {
      enter(function, r);
      try {
        result = call(r);
      } catch (...) {
        error = std::current_exception();
      }
      if (result == kSuccess) continue;
      failed = function;
      rank = r;
    }
    enter("ncclGroupEnd", kEveryRank);
    const Result end = library_.group_end();
    if (result == kSuccess && end != kSuccess) {
      result = end;
      failed = function;  // ncclGroupEnd runs the calls of the group
      rank = broken_rank();
    }
  }
  enter(nullptr, kEveryRank);
  if (result != kSuccess && error == nullptr) error = error_of(result, failed, rank);
  if (error == nullptr) return;
  abort();
  std::rethrow_exception(error);
}

bool Communicators::look_after() {
  if (!open_) return false;
  try {
    if (const std::size_t rank = broken_rank(); rank != kEveryRank) {
      Result result = kSuccess;
      static_cast<void>(library_.comm_get_async_error(comms_[rank], &result));
      fail(error_of(result, outstanding_.empty() ? "a collective" : outstanding_.front().function, rank));
      return false;
    }
    drop_finished();
    if (outstanding_.empty()) return false;
    const Operation& oldest = outstanding_.front();
    if (!oldest.started || Clock::now() - *oldest.started < timeout_) return true;
    fail(late(oldest));
  } catch (...) {  // a device was lost
    fail(std::current_exception());
  }
  return false;
}

bool Communicators::finish(Operation& operation) {
  const auto done = [](const std::unique_ptr<Event>& event) { return event->done(); };
  if (!operation.started) {
    if (!std::all_of(operation.arrived.begin(), operation.arrived.end(), done)) return false;
    operation.started = Clock::now();
  }
  return std::all_of(operation.finished.begin(), operation.finished.end(), done);
}

void Communicators::drop_finished() {
  while (!outstanding_.empty() && finish(outstanding_.front())) {
    spare_.push_back(std::move(outstanding_.front()));
    outstanding_.pop_front();
  }
}

void Communicators::await_all() {
  while (look_after()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  check();
}

void Communicators::give_up() {
  if (!open_) return;
  try {
    drop_finished();
    if (outstanding_.empty()) return;
    if (outstanding_.front().started) fail(late(outstanding_.front()));
  } catch (...) {  // a device was lost
    fail(std::current_exception());
  }
  if (open_) abort();
}

void Communicators::close() {
  const auto deadline = Clock::now() + timeout_;
  while (look_after() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (!open_) return;
  if (!outstanding_.empty()) return abort();
  group("ncclCommDestroy", [&](std::size_t r) { return library_.comm_destroy(std::exchange(comms_[r], nullptr)); });
  open_ = false;
}

/// The first rank whose communicator reports an error; kEveryRank if there is none.
std::size_t Communicators::broken_rank() {
  for (std::size_t r = 0; r < comms_.size(); ++r) {
    if (comms_[r] == nullptr) continue;
    Result result = kSuccess;
    if (library_.comm_get_async_error(comms_[r], &result) != kSuccess) continue;
    if (result != kSuccess && result != kInProgress) return r;
  }
  return kEveryRank;
}

std::string Communicators::name_of_rank(std::size_t rank) const {
  if (rank != kEveryRank) return endpoints_[rank].device.name;
  std::vector<std::string_view> names;
  for (const internal::Endpoint& each : endpoints_) names.push_back(each.device.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::exception_ptr Communicators::error_of(Result result, const char* function, std::size_t rank) const {
  const char* const last = library_.get_last_error(rank == kEveryRank ? nullptr : comms_[rank]);
  // NCCL does not say which of CUDA's errors it met. One that needs a new process is the device's own.
  if (result == kUnhandledCudaError || result == kSystemError || result == kInternalError) {
    for (const internal::Endpoint& endpoint : endpoints_) {
      try {
        cuda::check_alive(endpoint.device.index);
      } catch (const DeviceLost&) {
        return std::current_exception();
      }
    }
  }
  const std::string detail = last == nullptr || *last == '\0' ? "" : fmt::format(" NCCL says: {}", last);
  return std::make_exception_ptr(Error(
      fmt::format("{}: {} failed: {} (NCCL error {}).{} All connections were given up; the next call makes new ones. "
                  "NCCL_DEBUG=WARN in the environment tells more; Transport::copies does without NCCL.",
                  name_of_rank(rank), function, library_.get_error_string(result), static_cast<int>(result), detail),
      rank == kEveryRank ? "" : name_of_rank(rank)));
}

std::exception_ptr Communicators::late(const Operation& operation) const {
  std::vector<std::string> stuck;
  for (std::size_t r = 0; r < endpoints_.size(); ++r) {
    if (!operation.finished[r]->done()) stuck.push_back(endpoints_[r].device.name);
  }
  return std::make_exception_ptr(Timeout(
      fmt::format("{}: {} did not end within {:g} s, though every GPU had come to it. All connections were given "
                  "up, and the next call makes new ones; what the buffers hold is not defined. If it is the "
                  "first one, GPUs may be unable to reach each other's memory (NCCL_P2P_DISABLE=1 does without; "
                  "Transport::copies without NCCL).",
                  fmt::join(stuck, ", "), operation.function, seconds(timeout_)),
      stuck.size() == 1 ? stuck.front() : ""));
}

/// Records the failure before the abort lets the streams go on. So a thread that sees a later event done also sees the
/// failure. A thread that sees the failure also sees the connections closed, so the next call makes new ones.
void Communicators::fail(std::exception_ptr failure) {
  {
    const std::lock_guard lock(mutex_);
    open_ = false;
    if (failure_ == nullptr) failure_ = std::move(failure);
  }
  abort();
}

/// Aborts all communicators, because what they share is freed with the last one.
void Communicators::abort() noexcept {
  open_ = false;
  enter("ncclCommAbort", kEveryRank);
  static_cast<void>(library_.group_start());
  for (Comm& comm : comms_) {
    if (comm != nullptr) static_cast<void>(library_.comm_abort(std::exchange(comm, nullptr)));
  }
  static_cast<void>(library_.group_end());
  enter(nullptr, kEveryRank);
  outstanding_.clear();
}

void Communicators::check() {
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Communicators::enter(const char* function, std::size_t rank) {
  const std::lock_guard lock(mutex_);
  position_ = {function, rank};
}

Communicators::Position Communicators::position() const {
  const std::lock_guard lock(mutex_);
  return position_;
}

}  // namespace paceline::nccl
