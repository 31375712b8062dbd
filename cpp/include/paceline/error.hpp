// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

#include <paceline/export.hpp>

// Where an error is made. nvcc 13.0 breaks off with an internal error over the usual default argument; errors that are
// made in a .cu file do without.
#if defined(__CUDACC__)
#define PACELINE_HERE std::source_location()
#else
#define PACELINE_HERE std::source_location::current()
#endif

namespace paceline {

/// Base of every exception this library throws.
///
/// what() is a sentence a person can act on: what failed, why, where, and what to do. `device()` names
/// the device it happened on ("host:1"), or is empty when no single device is to blame; `where()` is the
/// place in the library's source that raised it.
class PACELINE_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, std::string device = {}, std::source_location where = PACELINE_HERE);
  ~Error() override;

  [[nodiscard]] const std::string& device() const noexcept { return device_; }
  [[nodiscard]] const std::source_location& where() const noexcept { return where_; }

 private:
  std::string device_;
  std::source_location where_;
};

/// An argument cannot be used as given; nothing was changed. ValueError in Python.
class PACELINE_API InvalidArgument : public Error {
 public:
  using Error::Error;
  ~InvalidArgument() override;
};

/// Something this machine or this build does not have. RuntimeError in Python.
class PACELINE_API Unavailable : public Error {
 public:
  using Error::Error;
  ~Unavailable() override;
};

/// A deadline passed. TimeoutError in Python.
class PACELINE_API Timeout : public Error {
 public:
  using Error::Error;
  ~Timeout() override;
};

/// The work was given up because something else failed or the group is closing.
class PACELINE_API Cancelled : public Error {
 public:
  using Error::Error;
  ~Cancelled() override;
};

/// A job that a pool did not take: its queue is full, no device can run it, or it could not end by its deadline.
/// RuntimeError in Python.
class PACELINE_API Rejected : public Error {
 public:
  using Error::Error;
  ~Rejected() override;
};

/// A job that waited until it could no longer end by its deadline. TimeoutError in Python.
class PACELINE_API Expired : public Timeout {
 public:
  using Timeout::Timeout;
  ~Expired() override;
};

/// A device or the host has no memory left for what was asked. MemoryError in Python.
class PACELINE_API OutOfMemory : public Error {
 public:
  using Error::Error;
  ~OutOfMemory() override;
};

/// A device can no longer be used by this process: an error that CUDA repairs only for a new one.
/// RuntimeError in Python.
class PACELINE_API DeviceLost : public Error {
 public:
  using Error::Error;
  ~DeviceLost() override;
};

}  // namespace paceline
