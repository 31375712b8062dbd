// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <thread>

#include <paceline/runtime/blocking.hpp>

namespace paceline {

/// What somebody throws who does not want to wait.
struct Interrupt {};

/// As long as this is there, the first poll of each wait of this thread throws Interrupt.
class Interrupting {
 public:
  Interrupting() {
    impatient = std::this_thread::get_id();
    set_blocking_hooks(
        {.enter = []() -> void* { return std::this_thread::get_id() == impatient ? &impatient : nullptr; },
         .leave = [](void*) {},
         .poll = [](void*) { throw Interrupt(); }});
  }
  ~Interrupting() { set_blocking_hooks({}); }
  Interrupting(const Interrupting&) = delete;
  Interrupting& operator=(const Interrupting&) = delete;

 private:
  static inline std::thread::id impatient;
};

}  // namespace paceline
