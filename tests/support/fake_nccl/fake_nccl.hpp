// SPDX-License-Identifier: Apache-2.0
//
// A fake of NCCL: a shared library with the same entry points, which paceline opens like the real one. Collectives are
// enqueued on the streams of the fake CUDA runtime and really add; faults can be ordered.
//
// A rank's part of a collective begins by reading its own buffer, waits until the ranks that it needs have read theirs,
// and ends by writing its own. So whoever forgets a wait, on one rank only, is noticed as with the real one's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nccl_api.hpp"

namespace fake {

/// What a stream can wait for.
using Signal = std::shared_ptr<void>;

/// How the shared library reaches the fake CUDA of the program that opened it.
struct NcclHost {
  Signal (*make_signal)();
  void (*give)(const Signal& signal);
  void (*enqueue)(cudaStream_t stream, const char* name, std::function<void()> body, const Signal& awaited,
                  const Signal& given);
  int (*device_of)(cudaStream_t stream);
  int (*current_device)();
  void* (*allocate)(int device, std::size_t bytes);  ///< null: no memory left
  void (*free)(void* data);
  void (*reads)(const void* data, std::size_t bytes);
  void (*writes)(const void* data, std::size_t bytes);
  /// As NCCL does it, whose minima and maxima drop NaNs.
  void (*reduce)(std::span<const void* const> inputs, void* output, std::size_t count, paceline::nccl::DataType type,
                 paceline::nccl::ReductionOperation op);
};

/// Orders for the fake, and what it has seen. Any thread.
class Nccl {
 public:
  /// As if just loaded, on this machine.
  virtual void reset(const NcclHost& host) = 0;
  virtual void set_version(int version) = 0;

  static constexpr int kAnyRank = -1;
  /// The next call of that function, for that rank, gives `result`.
  virtual void fail(const std::string& function, int rank, paceline::nccl::Result result) = 0;
  /// The next such call comes back after `time`.
  virtual void delay(const std::string& function, int rank, std::chrono::milliseconds time) = 0;
  /// The next such call does not come back before release().
  virtual void hold(const std::string& function, int rank) = 0;
  virtual void release() = 0;
  /// The next collective (of that name) never ends on any rank, unless it is aborted.
  virtual void hang(const std::string& function = "") = 0;
  /// From now on ncclCommGetAsyncError says so of that rank.
  virtual void break_rank(int rank, paceline::nccl::Result result) = 0;

  [[nodiscard]] virtual int communicators() const = 0;  ///< that are there
  [[nodiscard]] virtual int made() const = 0;           ///< since reset()
  [[nodiscard]] virtual int aborted() const = 0;        ///< since reset()
  [[nodiscard]] virtual int inside() const = 0;         ///< calls that have not come back
  [[nodiscard]] virtual int allocations() const = 0;    ///< of ncclMemAlloc that are there
  [[nodiscard]] virtual int registrations() const = 0;  ///< that are there
  /// Ranks' parts in collectives since reset(): by memory that is registered, and by other.
  struct Uses {
    int registered = 0;
    int other = 0;
  };
  [[nodiscard]] virtual Uses uses() const = 0;
  /// Of that function since reset().
  [[nodiscard]] virtual int calls(const std::string& function) const = 0;
  /// Misuse that the real one answers with a hang or worse.
  [[nodiscard]] virtual std::vector<std::string> problems() const = 0;

 protected:
  ~Nccl() = default;
};

}  // namespace fake

/// The shared library's only entry point that is not NCCL's.
extern "C" [[gnu::visibility("default")]] fake::Nccl* fake_nccl();
