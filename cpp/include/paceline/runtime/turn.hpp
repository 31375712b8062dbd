// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>

#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline {

class TurnLoan;

/// The right to use a device. The thread that has a device's turn runs pinned to it (to its cores, or to the GPU and
/// its stream). Each worker has its device's turn, and may lend it to another thread while a piece of work runs.
class PACELINE_API Turn {
 public:
  explicit Turn(const Device& device) : device_(&device) {}
  [[nodiscard]] const Device& device() const noexcept { return *device_; }

  /// The device whose turn the calling thread has, as a worker at a piece of work or as a borrower; null if none.
  [[nodiscard]] static const Device* of_this_thread() noexcept;

  /// Lends the turn to the thread that borrows from `loan`, and blocks until that thread has given it back.
  /// @return false if the loan was closed before the turn was borrowed.
  bool lend(TurnLoan& loan) const;

 private:
  const Device* device_;
};

/// Lets one thread borrow turns from workers, one turn after another. A thread whose stack cannot move to a worker (a
/// Python frame between two stages of a pipeline) visits the devices this way.
///
///   TurnLoan loan;
///   std::thread borrower([&] { while (const Turn* turn = loan.borrow()) { use(turn->device()); loan.give_back(); } });
///   // on a worker, in WorkSource::perform():
///   turn.lend(loan);   // the borrower runs, pinned to the worker's device, until it gives the turn back
///
/// Lender and borrower never run at once. There is one borrower. Several workers may lend; one of them is served at a
/// time.
class PACELINE_API TurnLoan {
 public:
  TurnLoan() = default;
  TurnLoan(const TurnLoan&) = delete;
  TurnLoan& operator=(const TurnLoan&) = delete;

  /// For the borrowing thread: waits until a worker lends its turn, and pins the thread to that device. Null once the
  /// loan is closed. Requires: the last turn was given back.
  [[nodiscard]] const Turn* borrow();
  void give_back();
  /// No worker lends from now on, and a waiting worker takes its unborrowed turn back. Any thread.
  void close();

 private:
  friend class Turn;
  std::mutex mutex_;
  std::condition_variable changed_;
  const Turn* offered_ = nullptr;  // by the waiting lender
  bool borrowed_ = false;
  bool closed_ = false;
};

}  // namespace paceline
