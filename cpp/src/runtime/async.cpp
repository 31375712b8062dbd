// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/async.hpp>

#include <algorithm>
#include <chrono>
#include <thread>

#include <paceline/runtime/blocking.hpp>

namespace paceline {

Event::~Event() = default;
Buffer::~Buffer() = default;
Stream::~Stream() = default;
AsyncDevice::~AsyncDevice() = default;

void wait_for(const Event& event) {
  if (event.done()) return;
  const BlockingRegion region;
  // A micro-batch that is due within microseconds shall not wait for a sleeping thread to be woken (50 us and more).
  constexpr int kEagerRounds = 200;
  for (int round = 0; round < kEagerRounds; ++round) {
    std::this_thread::yield();
    if (event.done()) return;
  }
  auto pause = std::chrono::microseconds(5);
  while (!event.done()) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(100));
  }
}

}  // namespace paceline
