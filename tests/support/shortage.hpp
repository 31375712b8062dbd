// SPDX-License-Identifier: Apache-2.0
//
// Memory that runs out when a test says so. Include it in one file of a program: it replaces the program's operator
// new.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace paceline {

/// While it lives, the n-th allocation of this thread fails, and all later ones too if `all_later`.
class Shortage {
 public:
  explicit Shortage(int n = 1, bool all_later = true) {
    left_ = n;
    all_later_ = all_later;
  }
  ~Shortage() { left_ = kNone; }
  Shortage(const Shortage&) = delete;
  Shortage& operator=(const Shortage&) = delete;

  /// Null where this allocation fails.
  static void* allocate(std::size_t bytes) noexcept { return fails() ? nullptr : std::malloc(bytes > 0 ? bytes : 1); }

 private:
  static constexpr int kNone = -1;

  static bool fails() noexcept {
    if (left_ == kNone) return false;
    if (left_ > 1) return --left_, false;
    if (!all_later_) left_ = kNone;
    return true;
  }

  static thread_local int left_;  // allocations until one fails
  static thread_local bool all_later_;
};

inline thread_local int Shortage::left_ = Shortage::kNone;
inline thread_local bool Shortage::all_later_ = false;

}  // namespace paceline

// Not inlined: GCC would take the freed memory for that of another allocation function. AddressSanitizer has an
// operator of its own for each of these, whose memory may not be freed by the operators here.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return paceline::Shortage::allocate(bytes);
}
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* const data = paceline::Shortage::allocate(bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }
