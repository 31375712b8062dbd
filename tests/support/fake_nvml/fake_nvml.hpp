// SPDX-License-Identifier: Apache-2.0
//
// A fake of NVIDIA's management library: a shared library with the entry points that paceline looks for, loaded by an
// explicit path as the real one would be. What its GPUs say, what fails and how long a call takes is set through
// fake_nvml_state(). It is built several times, with all names, with those of old drivers only, and with few.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake_nvml {

struct Process {
  std::uint32_t pid = 0;
  std::uint64_t memory = 0;
};

struct Field {
  std::uint64_t value = 0;
  int type = 3;    ///< unsigned long long
  int status = 0;  ///< success
};

struct Gpu {
  std::uint32_t clock_mhz = 1980;
  std::uint32_t max_clock_mhz = 1980;
  unsigned long long limits = 0;
  std::map<std::uint32_t, Field> fields;  ///< by number; others are not supported
  std::uint32_t temperature = 40;
  std::uint32_t power_milliwatts = 100000;
  std::uint32_t power_limit_milliwatts = 700000;
  std::vector<Process> compute;
  std::vector<Process> graphics;
  std::vector<int> links;            ///< 1: active
  std::map<std::string, int> peers;  ///< P2P status by the other's bus id; others: not supported
};

struct State {
  std::map<std::string, Gpu> gpus;    ///< by PCI bus id
  std::map<std::string, int> status;  ///< what a function answers instead of doing its work
  std::string driver_version = "580.126.09";
  std::chrono::milliseconds delay{0};  ///< of every call
  std::atomic<bool> hangs = false;     ///< no call comes back until it is false again
  int starts = 0;
  int stops = 0;
  std::atomic<int> inside = 0;
  std::atomic<bool> overlapped = false;  ///< two threads were in the library at once
};

}  // namespace fake_nvml
