// SPDX-License-Identifier: Apache-2.0
//
// A fake of NVIDIA's management library: a shared library with the entry points that paceline looks up. Tests set the
// state of its GPUs, its failures and the time of a call through fake_nvml_state().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake_nvml {

struct Process {
  std::uint32_t number = 0;
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
  std::map<std::uint32_t, Field> fields;  ///< by number; other numbers are not supported
  std::uint32_t temperature = 40;
  std::uint32_t power_milliwatts = 100000;
  std::uint32_t power_limit_milliwatts = 700000;
  std::vector<Process> compute;
  std::vector<Process> graphics;
};

struct State {
  std::map<std::string, Gpu> gpus;     ///< by PCI bus id
  std::map<std::string, int> status;   ///< results that functions return instead of doing their work
  std::chrono::milliseconds delay{0};  ///< of every call
  std::atomic<bool> hangs = false;     ///< calls return only when it is false
  std::atomic<int> inside = 0;
  std::atomic<bool> overlapped = false;  ///< set if two threads were in the library at once
};

}  // namespace fake_nvml
