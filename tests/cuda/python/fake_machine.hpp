// SPDX-License-Identifier: Apache-2.0
// What the fake device of PyTorch knows of its streams: which has waited for what, and who may still use which memory.
#pragma once

#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace paceline_fake {

constexpr int kDevices = 8;
using Seen = std::map<int, std::uint64_t>;  // by stream: how much of its work has been waited for

struct Stream {
  int device = 0;
  std::uint64_t now = 0;
  Seen seen;
};

struct Memory {
  int stream = 0;  // where it was allocated
  std::pair<int, std::uint64_t> written{0, 0};
  Seen uses;           // also writes
  std::set<int> kept;  // streams that were recorded
  std::size_t bytes = 0;
};

struct Arrival {  // a copy to the host that has not arrived
  int stream;
  std::uint64_t at;
  std::vector<char> bytes;
  c10::Storage target;
  std::size_t offset;
};

struct Machine {
  std::recursive_mutex mutex;
  std::vector<Stream> streams;
  std::vector<std::pair<int, Seen>> events;  // the stream, and what it had seen
  std::map<void*, Memory> memory;
  std::vector<Arrival> arrivals;
  std::map<int, std::vector<Seen>> freed;  // by stream: uses of memory that its next allocation may take
  Seen host;                               // what the host has waited for
  std::vector<std::string> problems;
  int crossings = 0;  // copies from one device to another, with two events each
  std::size_t in_use[kDevices] = {}, peak[kDevices] = {}, limit[kDevices] = {};

  Machine() {
    for (int d = 0; d < kDevices; ++d) streams.push_back({d});
  }
  bool ordered(int before, std::uint64_t at, int after) {
    if (before == after) return true;
    return streams[after].seen[before] >= at || host[before] >= at;
  }
  void wait(int stream, const Seen& seen) {
    for (const auto& [other, at] : seen) streams[stream].seen[other] = std::max(streams[stream].seen[other], at);
  }
  Seen mark(int stream) {
    Seen seen = streams[stream].seen;
    seen[stream] = streams[stream].now;
    return seen;
  }
  void host_waits(const Seen& seen) {
    for (const auto& [other, at] : seen) host[other] = std::max(host[other], at);
    std::vector<Arrival> left;
    for (Arrival& one : arrivals) {
      if (host[one.stream] >= one.at) {
        std::memcpy(static_cast<char*>(one.target.mutable_data()) + one.offset, one.bytes.data(), one.bytes.size());
      } else {
        left.push_back(std::move(one));
      }
    }
    arrivals.swap(left);
  }
  void problem(const std::string& text) {
    if (problems.size() < 20) problems.push_back(text);
  }
  void reuse(int stream) {
    for (const Seen& uses : freed[stream]) {
      for (const auto& [other, at] : uses) {
        if (!ordered(other, at, stream)) {
          problem("stream " + std::to_string(stream) + " takes memory that stream " + std::to_string(other) +
                  " may still use, which was not recorded");
        }
      }
    }
    freed[stream].clear();
  }
  void use(void* data, int stream, bool write, const std::string& what) {
    auto found = memory.find(data);
    if (found == memory.end()) return;
    Memory& one = found->second;
    const std::uint64_t now = streams[stream].now;
    if (!ordered(one.written.first, one.written.second, stream)) {
      problem(what + ": stream " + std::to_string(stream) + " uses what stream " + std::to_string(one.written.first) +
              " has written, and has not waited for it");
    }
    if (write) {
      for (const auto& [other, at] : one.uses) {
        if (!ordered(other, at, stream)) {
          problem(what + ": stream " + std::to_string(stream) + " writes to what stream " + std::to_string(other) +
                  " may still use");
        }
      }
      one.written = {stream, now};
    }
    one.uses[stream] = now;
  }
};

inline Machine& machine() {
  static auto* one = new Machine;
  return *one;
}

}  // namespace paceline_fake
