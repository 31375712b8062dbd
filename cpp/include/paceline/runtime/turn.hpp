// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>

#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline {

class TurnLoan;

/// The right to use a device: whoever has its turn runs pinned to it (its cores, or the GPU and its stream). Each
/// worker has the turn of its device. While a piece of work runs, it may lend the turn to another thread.
class PACELINE_API Turn {
 public:
  explicit Turn(const Device& device) : device_(&device) {}
  [[nodiscard]] const Device& device() const noexcept { return *device_; }

  /// Lends the turn to the thread that borrows it there, and returns when that thread has given it back. Meanwhile the
  /// calling thread does nothing.
  /// @return false if the loan was closed before anybody had the turn.
  bool lend(TurnLoan& loan) const;

 private:
  const Device* device_;
};

/// Where one thread, of anybody's, borrows turns from workers, one after the other: a thread whose stack cannot move
/// to a worker (a Python frame between two stages of a pipeline) moves to the devices this way.
///
///   TurnLoan loan;
///   std::thread borrower([&] { while (const Turn* turn = loan.borrow()) { use(turn->device()); loan.give_back(); } });
///   // on a worker, in WorkSource::perform():
///   turn.lend(loan);   // the borrower runs, pinned to the worker's device, until it gives the turn back
///
/// Lender and borrower never run at once. One borrower; any number of lenders, of which one at a time is served.
class PACELINE_API TurnLoan {
 public:
  TurnLoan() = default;
  TurnLoan(const TurnLoan&) = delete;
  TurnLoan& operator=(const TurnLoan&) = delete;

  /// On the borrowing thread: waits until a worker lends its turn, and pins the thread to that device. Null once the
  /// loan is closed. Requires: the last turn was given back.
  [[nodiscard]] const Turn* borrow();
  void give_back();
  /// No further turn is lent, and one that is lent goes back. Any thread.
  void close();

 private:
  friend class Turn;
  std::mutex mutex_;
  std::condition_variable changed_;
  const Turn* offered_ = nullptr;  // by the lender that waits
  bool borrowed_ = false;
  bool closed_ = false;
};

}  // namespace paceline
