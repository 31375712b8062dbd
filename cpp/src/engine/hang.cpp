// SPDX-License-Identifier: Apache-2.0
#include "engine/hang.hpp"

#include <fmt/format.h>

#include <paceline/error.hpp>

namespace paceline::internal {

void Hang::await(const Event& event, std::chrono::nanoseconds timeout) const {
  if (*found_ && !event.done()) throw_late(event, timeout);
  try {
    wait_for(event, timeout);
  } catch (const Timeout&) {
    note();
    throw;
  }
}

void Hang::check(const char* call) const {
  if (!*found_) return;
  throw DeviceLost(fmt::format(
      "{}: a device did not end what an earlier step gave it, and may still be at it. Start a new process.", call));
}

void Hang::drain(AsyncDevice* device, Stream* stream, std::chrono::nanoseconds timeout) const {
  if (device == nullptr || stream == nullptr || *found_) return;
  try {
    const std::unique_ptr<Event> event = device->make_event(false);
    stream->record(*event);
    await(*event, timeout);
  } catch (const Error&) {
  }
}

}  // namespace paceline::internal
