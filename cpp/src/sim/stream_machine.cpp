// SPDX-License-Identifier: Apache-2.0
#include "sim/stream_machine.hpp"

#include <algorithm>
#include <limits>

namespace paceline::sim {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kNothing = 1e-9;  // of bytes, or of seconds times 1e-9

}  // namespace

StreamMachine::StreamMachine(std::size_t stream_count, std::size_t gpu_count, const LinkSpeeds& links)
    : streams_(stream_count), gpu_count_(gpu_count), links_(links) {}

void StreamMachine::compute(std::size_t stream, double seconds) {
  streams_[stream].operations.push_back({.kind = Kind::compute, .left = seconds});
}

void StreamMachine::copy(std::size_t stream, std::size_t from, std::size_t to, double bytes) {
  streams_[stream].operations.push_back(
      {.kind = Kind::copy, .left = bytes, .latency = links_.latency_seconds, .from = from, .to = to});
}

StreamMachine::Event StreamMachine::record(std::size_t stream) {
  times_.push_back(-1.0);
  streams_[stream].operations.push_back({.kind = Kind::record, .event = times_.size() - 1});
  return times_.size() - 1;
}

void StreamMachine::wait(std::size_t stream, Event event) {
  streams_[stream].operations.push_back({.kind = Kind::wait, .event = event});
}

void StreamMachine::pass() {
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream& stream : streams_) {
      while (!stream.done()) {
        const Operation& next = stream.operations[stream.next];
        if (next.kind == Kind::record) {
          times_[next.event] = now_;
        } else if (next.kind == Kind::wait ? times_[next.event] < 0.0 : next.left > 0.0) {
          break;
        }
        ++stream.next;
        moved = true;
      }
    }
  }
}

/// Max-min fairness: the most crowded link sets the rate of its copies, and the others share what is left.
void StreamMachine::share_links() {
  std::vector<Operation*> copies;
  for (Stream& stream : streams_) {
    if (stream.done()) continue;
    Operation& now = stream.operations[stream.next];
    now.rate = 0.0;
    if (now.kind == Kind::copy && now.latency <= 0.0) copies.push_back(&now);
  }
  // Links: out of each GPU, into each GPU, and the host.
  std::vector<double> room(2 * gpu_count_ + 1, links_.port_bytes_per_second);
  room.back() = links_.host_bytes_per_second > 0.0 ? links_.host_bytes_per_second : kInfinite;
  const auto links_of = [&](const Operation& copy) {
    return std::vector<std::size_t>{copy.from, gpu_count_ + copy.to, 2 * gpu_count_};
  };
  while (!copies.empty()) {
    std::vector<std::size_t> users(room.size(), 0);
    for (const Operation* copy : copies) {
      for (const std::size_t link : links_of(*copy)) ++users[link];
    }
    const auto limit = [&](const Operation& copy) {
      double rate = links_.pair_bytes_per_second;
      for (const std::size_t link : links_of(copy))
        rate = std::min(rate, room[link] / static_cast<double>(users[link]));
      return rate;
    };
    double least = kInfinite;
    for (const Operation* copy : copies) least = std::min(least, limit(*copy));
    std::vector<Operation*> others;
    std::vector<Operation*> settled;
    for (Operation* copy : copies) (limit(*copy) <= least * (1.0 + 1e-12) ? settled : others).push_back(copy);
    for (Operation* copy : settled) {
      copy->rate = least;
      for (const std::size_t link : links_of(*copy)) room[link] -= least;
    }
    copies.swap(others);
  }
}

void StreamMachine::run() {
  for (pass();; pass()) {
    share_links();
    double step = kInfinite;
    for (const Stream& stream : streams_) {
      if (stream.done()) continue;
      const Operation& now = stream.operations[stream.next];
      if (now.kind == Kind::compute) step = std::min(step, now.left);
      if (now.kind == Kind::copy) step = std::min(step, now.latency > 0.0 ? now.latency : now.left / now.rate);
    }
    if (step == kInfinite) return;
    now_ += step;
    for (Stream& stream : streams_) {
      if (stream.done()) continue;
      Operation& now = stream.operations[stream.next];
      double& left = now.kind == Kind::copy && now.latency > 0.0 ? now.latency : now.left;
      if (now.kind == Kind::compute || &left == &now.latency) {
        left = left - step <= kNothing * step ? 0.0 : left - step;
      } else if (now.kind == Kind::copy) {
        left -= now.rate * step;
        if (left <= kNothing * now.rate * step + kNothing) left = 0.0;
      }
    }
  }
}

}  // namespace paceline::sim
