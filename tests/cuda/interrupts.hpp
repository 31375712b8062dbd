// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <thread>
#include <utility>

#include <paceline/runtime/blocking.hpp>

namespace paceline {

/// What somebody throws who does not want to wait.
struct Interrupt {};

/// As long as this is there, each wait of this thread throws Interrupt at its first poll at which `when` holds.
class Interrupting {
 public:
  explicit Interrupting(std::function<bool()> when = [] { return true; }) {
    impatient = std::this_thread::get_id();
    it_is_time = std::move(when);
    set_blocking_hooks(
        {.enter = []() -> void* { return std::this_thread::get_id() == impatient ? &impatient : nullptr; },
         .leave = [](void*) {},
         .poll =
             [](void*) {
               if (it_is_time()) throw Interrupt();
             }});
  }
  ~Interrupting() { set_blocking_hooks({}); }
  Interrupting(const Interrupting&) = delete;
  Interrupting& operator=(const Interrupting&) = delete;

 private:
  static inline std::thread::id impatient;
  static inline std::function<bool()> it_is_time;
};

}  // namespace paceline
