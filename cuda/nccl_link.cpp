// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <paceline/error.hpp>

#include "comm/link.hpp"
#include "device_guard.hpp"
#include "driver.hpp"
#include "nccl_communicators.hpp"
#include "runtime/deadline.hpp"
#include "runtime/issuing_thread.hpp"

namespace paceline::nccl {
namespace {

std::atomic<bool> exiting{false};

/// At the end of the program NCCL and the driver may be gone first, so nothing calls them after this point.
void note_the_exit() {
  static const int registered = std::atexit([] { exiting = true; });
  static_cast<void>(registered);
}

/// How often the issuing thread looks after work under way: often enough for the deadline, and seldom enough to be
/// cheap.
std::chrono::nanoseconds interval_for(std::chrono::nanoseconds timeout) {
  return std::clamp<std::chrono::nanoseconds>(timeout / 8, std::chrono::milliseconds(1), std::chrono::milliseconds(10));
}

/// Whether NCCL drops NaNs: its minimum or maximum of a NaN and a number is the number. Such reductions go by copies
/// and our own kernel, which gives the NaN.
bool drops_nans(DType dtype, ReduceOp op) {
  const bool integers = dtype == DType::int32 || dtype == DType::int64;
  return !integers && (op == ReduceOp::min || op == ReduceOp::max);
}

using internal::IssuingThread;
using Interrupt = IssuingThread::Interrupt;

class NcclLink final : public internal::Link {
 public:
  NcclLink(const Library& library, const std::vector<internal::Endpoint>& endpoints, const CommunicatorOptions& options)
      : library_(library),
        timeout_(internal::bounded(options.timeout)),
        warm_up_bytes_(options.warm_up_bytes),
        copies_(internal::make_copy_link(endpoints, "beside NCCL")),
        communicators_(std::make_shared<Communicators>(library, endpoints, timeout_)),
        thread_(
            // NCCL switches devices itself. On a thread without a context its first call would make GPU 0's context.
            "pl nccl",
            [device = endpoints.front().device.index] { return std::make_shared<cuda::DeviceGuard>(device); },
            [communicators = communicators_] { return communicators->look_after(); }, interval_for(timeout_)) {
    note_the_exit();
    try {
      open();
    } catch (const Error&) {
      if (!thread_.given_up()) static_cast<void>(thread_.close(timeout_));
      throw;
    } catch (...) {  // interrupted
      leave();
      throw;
    }
  }

  ~NcclLink() override {
    if (exiting) {
      static_cast<void>(new auto(std::move(communicators_)));
      static_cast<void>(copies_.release());
      return;
    }
    try {
      close();
    } catch (...) {  // what hangs is left behind, as close() says; a destructor cannot report it
    }
  }

  [[nodiscard]] std::string description() const override {
    return fmt::format("NCCL {} ({})", version_text(library_.version), library_.path);
  }

  [[nodiscard]] bool accesses_peers() const noexcept override { return true; }

  void all_reduce(std::span<void* const> buffers, std::size_t count, DType dtype, ReduceOp op) override {
    if (drops_nans(dtype, op)) return copies_->all_reduce(buffers, count, dtype, op);
    open();
    run([communicators = communicators_, all = std::vector<void*>(buffers.begin(), buffers.end()), count, dtype, op] {
      communicators->all_reduce(all, count, dtype, op);
    });
  }

  void reduce(std::span<const internal::Piece> pieces, std::size_t count, DType dtype, ReduceOp op) override {
    if (drops_nans(dtype, op)) return copies_->reduce(pieces, count, dtype, op);
    open();
    run([communicators = communicators_, all = std::vector<internal::Piece>(pieces.begin(), pieces.end()), count, dtype,
         op] { communicators->reduce(all, count, dtype, op); });
  }

  void broadcast(std::span<const internal::Piece> pieces, std::size_t bytes) override {
    open();
    run([communicators = communicators_, all = std::vector<internal::Piece>(pieces.begin(), pieces.end()), bytes] {
      communicators->broadcast(all, bytes);
    });
  }

  [[nodiscard]] bool lost() const noexcept override { return thread_.given_up(); }

  void check() override {
    if (thread_.given_up()) throw_stuck();
    communicators_->check();
  }

  void give_up() override {
    run([communicators = communicators_] { communicators->give_up(); });
  }

  void close() override {
    if (exiting || std::exchange(closed_, true) || thread_.given_up()) return;
    try {
      // The work under way, and the end itself.
      run_long([communicators = communicators_] { communicators->close(); });
    } catch (const Error&) {
      throw;
    } catch (...) {  // interrupted
      leave();
      throw;
    }
    if (!thread_.close(timeout_)) throw_stuck();
  }

 private:
  void open() {
    if (communicators_->is_open()) return;
    // The connections, and the first messages.
    run_long([communicators = communicators_, bytes = warm_up_bytes_] { communicators->open(bytes); });
  }

  /// Ends the connections. Nobody waits for that.
  void leave() noexcept {
    thread_.leave([communicators = communicators_] { communicators->close(); });
  }

  void run(IssuingThread::Job job) {
    if (thread_.given_up() || !thread_.run(std::move(job), timeout_)) throw_stuck();
  }

  /// Twice the timeout, because the job does two things. Ctrl-C ends the wait.
  void run_long(IssuingThread::Job job) {
    if (thread_.given_up() || !thread_.run(std::move(job), 2 * timeout_, Interrupt::yes)) throw_stuck();
  }

  [[noreturn]] void throw_stuck() {
    const Communicators::Position position = communicators_->position();
    const std::string name = communicators_->name_of_rank(position.rank);
    throw Timeout(
        fmt::format("{}: NCCL did not come back from {} within {:g} s. Its thread was left behind, and this "
                    "communicator is of no use any more. NCCL may be stuck for the whole process: save what you need "
                    "and start again. NCCL_DEBUG=INFO in the environment tells more; Transport::copies does without "
                    "NCCL.",
                    name, position.function == nullptr ? "a call" : position.function,
                    std::chrono::duration<double>(timeout_).count()),
        position.rank == Communicators::kEveryRank ? "" : name);
  }

  const Library& library_;
  std::chrono::nanoseconds timeout_;
  std::size_t warm_up_bytes_;
  bool closed_ = false;
  std::unique_ptr<internal::Link> copies_;
  std::shared_ptr<Communicators> communicators_;  // shared with the thread, which may never return
  IssuingThread thread_;
};

}  // namespace

}  // namespace paceline::nccl

namespace paceline::internal {
namespace {

/// What NCCL cannot do with these GPUs; empty: nothing.
std::string why_not_nccl(const std::vector<Endpoint>& endpoints) {
  const char* const disabled = std::getenv("NCCL_P2P_DISABLE");
  const bool direct = disabled == nullptr || std::string_view(disabled) != "1";
  for (const Endpoint& one : endpoints) {
    for (const Endpoint& other : endpoints) {
      if (&one == &other) continue;
      if (one.device.index == other.device.index) {
        return fmt::format("{} and {} are parts of one GPU, and NCCL takes no two ranks of a process on one GPU",
                           one.device.name, other.device.name);
      }
      // NCCL asks CUDA which GPUs access each other, and would take a path that delivers wrong bytes.
      if (!direct || one.opened->link_to(*other.opened) != LinkKind::wrong_peer) continue;
      return fmt::format(
          "NCCL would copy directly between {} and {}, which access each other's memory, but what they copied arrived "
          "wrong. Set NCCL_P2P_DISABLE=1 in the environment, or use copies. An IOMMU or PCIe ACS often causes this: "
          "see cuda/README.md.",
          one.device.name, other.device.name);
    }
  }
  return "";
}

}  // namespace

std::unique_ptr<Link> make_native_link(const std::vector<Endpoint>& endpoints, const CommunicatorOptions& options,
                                       std::string& why_none) {
  const nccl::Library* found = nullptr;
  try {
    found = &nccl::library();
  } catch (const Unavailable& error) {
    why_none = error.what();
    return nullptr;
  }
  if (cuda::launches_block()) {
    throw Unavailable(
        "Communicator: CUDA_LAUNCH_BLOCKING is set. With it every launch waits for its kernel, and NCCL's first "
        "kernel waits for those of the other GPUs, which are never launched. Unset it, use one GPU, or choose "
        "Transport::copies.");
  }
  if (why_none = why_not_nccl(endpoints); !why_none.empty()) return nullptr;
  return std::make_unique<nccl::NcclLink>(*found, endpoints, options);
}

}  // namespace paceline::internal
