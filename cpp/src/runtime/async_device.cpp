// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/async_device.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/short_wait.hpp"

namespace paceline {

Event::~Event() = default;
Buffer::~Buffer() = default;
Stream::~Stream() = default;
AsyncDevice::~AsyncDevice() = default;

const char* name_of(LinkKind kind) noexcept {
  switch (kind) {
    case LinkKind::nvlink:
      return "NVLink";
    case LinkKind::pcie_peer:
      return "PCIe peer";
    case LinkKind::through_host:
      return "through the host";
    case LinkKind::wrong_peer:
      return "through the host, because direct copies arrived wrong";
  }
  return "unknown";
}

void throw_late(const Event& event, std::chrono::nanoseconds timeout) {
  const std::string device = event.device();
  throw Timeout(fmt::format("{}: what was enqueued has not ended within {:.3g} s. A kernel hangs, or waits for "
                            "something that does not come; or the limit is too low for this work.",
                            device, std::chrono::duration<double>(timeout).count()),
                device);
}

void wait_for(const Event& event, std::chrono::nanoseconds timeout) {
  if (event.done()) return;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  BlockingRegion region;
  // Spins at first, because waking a sleeping thread takes 50 us or more and a micro-batch may be due within
  // microseconds. Never yields: beside a busy program each yield costs that program's time slice, milliseconds.
  while (Clock::now() - start < internal::ShortWait::kSpin) {
    internal::relax();
    if (event.done()) return;
  }
  auto pause = std::chrono::microseconds(5);
  while (!event.done()) {
    if (Clock::now() - start > timeout) throw_late(event, timeout);
    region.poll();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(100));
  }
}

}  // namespace paceline
