// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/turn.hpp>

#include <paceline/runtime/backend.hpp>

#include "runtime/worker.hpp"

namespace paceline {

const Device* Turn::of_this_thread() noexcept { return internal::device_of_this_thread(); }

bool Turn::lend(TurnLoan& loan) const {
  std::unique_lock lock(loan.mutex_);
  loan.changed_.wait(lock, [&] { return loan.closed_ || loan.offered_ == nullptr; });
  if (loan.closed_) return false;
  loan.offered_ = this;
  loan.changed_.notify_all();
  // Waits for a borrower that has the turn even if the loan is closed, because two threads must never use one device.
  loan.changed_.wait(lock, [&] { return loan.offered_ != this || (loan.closed_ && !loan.borrowed_); });
  const bool given_back = loan.offered_ != this;
  if (!given_back) loan.offered_ = nullptr;
  return given_back;
}

const Turn* TurnLoan::borrow() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || offered_ != nullptr; });
  if (closed_) return nullptr;
  borrowed_ = true;
  const Turn* const turn = offered_;
  lock.unlock();
  internal::device_of_this_thread() = &turn->device();
  backend_of(turn->device()).prepare_worker(turn->device());
  return turn;
}

void TurnLoan::give_back() {
  internal::device_of_this_thread() = nullptr;
  {
    const std::lock_guard lock(mutex_);
    borrowed_ = false;
    offered_ = nullptr;
  }
  changed_.notify_all();
}

void TurnLoan::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

}  // namespace paceline
