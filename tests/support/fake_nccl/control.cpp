// SPDX-License-Identifier: Apache-2.0
//
// What tests set on the fake and read from it.
#include <utility>

#include "fake.hpp"

namespace fake {

void Fake::reset(const NcclHost& host) {
  const std::lock_guard lock(mutex_);
  host_ = host;
  version_ = 23007;
  faults_.clear();
  comms_.clear();
  under_way_.clear();
  problems_.clear();
  hang_ = released_ = false;
  made_ = aborted_ = inside_ = 0;
  groups_.clear();
  used_.clear();
  counts_.clear();
}

void Fake::set_version(int version) {
  const std::lock_guard lock(mutex_);
  version_ = version;
}

void Fake::release() {
  const std::lock_guard lock(mutex_);
  released_ = true;
  changed_.notify_all();
}

void Fake::hang(const std::string& function) {
  const std::lock_guard lock(mutex_);
  hang_ = true;
  hanging_ = function;
}

void Fake::break_rank(int rank, Result result) {
  const std::lock_guard lock(mutex_);
  for (const auto& comm : comms_) {
    if (comm->rank == rank) comm->error = result;
  }
}

void Fake::add(Fault fault) {
  const std::lock_guard lock(mutex_);
  released_ = false;
  faults_.push_back(std::move(fault));
}

bool Fake::used(const void* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* const begin = static_cast<const std::byte*>(data);
  const auto first = used_.lower_bound(begin);
  return first != used_.end() && *first < begin + bytes;
}

int Fake::calls(const std::string& function) const {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find(function);
  return found == counts_.end() ? 0 : found->second;
}

std::vector<std::string> Fake::problems() const {
  const std::lock_guard lock(mutex_);
  return problems_;
}

Fake& instance() {
  static Fake* const the_one = new Fake;
  return *the_one;
}

}  // namespace fake
