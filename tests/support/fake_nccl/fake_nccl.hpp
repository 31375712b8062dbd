// SPDX-License-Identifier: Apache-2.0
//
// A fake of NCCL: a shared library with the same entry points, which paceline opens like the real one. Collectives run
// on the streams of the fake CUDA runtime and really add. Tests can make calls fail.
//
// A rank's part of a collective reads its own buffer, waits until the ranks that it needs have read theirs, and then
// writes its own buffer. So a missing wait on a single rank is found, as with the real kernels.
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

/// Something that a stream can wait for.
using Signal = std::shared_ptr<void>;

/// How the shared library reaches the fake CUDA in the program that opened it.
struct NcclHost {
  Signal (*make_signal)();
  void (*give)(const Signal& signal);
  void (*enqueue)(cudaStream_t stream, const char* name, std::function<void()> body, const Signal& awaited,
                  const Signal& given);
  int (*device_of)(cudaStream_t stream);
  int (*current_device)();
  bool (*shared)(const void* data);  ///< whether kernels of all peers may access it
  void (*reads)(const void* data, std::size_t bytes);
  void (*writes)(const void* data, std::size_t bytes);
  /// Reduces as NCCL does, whose minima and maxima drop NaNs.
  void (*reduce)(std::span<const void* const> inputs, void* output, std::size_t count, paceline::nccl::DataType type,
                 paceline::nccl::ReductionOperation op);
};

/// Controls the fake and reads what it has seen. Any thread may use it.
class Nccl {
 public:
  /// Resets it to a newly loaded library on this machine.
  virtual void reset(const NcclHost& host) = 0;
  virtual void set_version(int version) = 0;

  static constexpr int kAnyRank = -1;
  /// Makes the next call of that function for that rank return `result`.
  virtual void fail(const std::string& function, int rank, paceline::nccl::Result result) = 0;
  /// Makes the next such call return after `time`.
  virtual void delay(const std::string& function, int rank, std::chrono::milliseconds time) = 0;
  /// Makes the next such call return only after release().
  virtual void hold(const std::string& function, int rank) = 0;
  virtual void release() = 0;
  /// Makes the next collective (of that name, if given) hang on every rank until it is aborted.
  virtual void hang(const std::string& function = "") = 0;
  /// From now on ncclCommGetAsyncError reports `result` for that rank.
  virtual void break_rank(int rank, paceline::nccl::Result result) = 0;

  [[nodiscard]] virtual int communicators() const = 0;  ///< that exist now
  [[nodiscard]] virtual int made() const = 0;           ///< since reset()
  [[nodiscard]] virtual int aborted() const = 0;        ///< since reset()
  [[nodiscard]] virtual int inside() const = 0;         ///< calls that have not returned
  /// Whether a collective has used this memory since reset().
  [[nodiscard]] virtual bool used(const void* data, std::size_t bytes) const = 0;
  /// Calls of that function since reset().
  [[nodiscard]] virtual int calls(const std::string& function) const = 0;
  /// Misuse that makes the real NCCL hang or worse.
  [[nodiscard]] virtual std::vector<std::string> problems() const = 0;

 protected:
  ~Nccl() = default;
};

}  // namespace fake

/// The shared library's only entry point that NCCL does not have.
extern "C" [[gnu::visibility("default")]] fake::Nccl* fake_nccl();
