// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <paceline/runtime/blocking.hpp>
#include <paceline/runtime/device_health.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

using Facts = py::typing::Dict<py::str, py::object>;

template <class T>
void add(Facts& facts, const char* name, const std::optional<T>& value) {
  if (value) facts[name] = *value;
}

Facts facts_of(const DeviceHealth& health) {
  Facts facts;
  add(facts, "clock_hz", health.clock_hz);
  add(facts, "max_clock_hz", health.max_clock_hz);
  if (health.limits) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < kClockLimitCount; ++i) {
      if (health.limits->test(i)) names.emplace_back(name_of(static_cast<ClockLimit>(i)));
    }
    facts["clock_limits"] = names;
  }
  std::map<std::string, double> times;
  for (std::size_t i = 0; i < kClockLimitCount; ++i) {
    const auto& time = health.limited_for[i];
    if (time) times[std::string(name_of(static_cast<ClockLimit>(i)))] = std::chrono::duration<double>(*time).count();
  }
  if (!times.empty()) facts["limited_seconds"] = times;
  add(facts, "temperature_celsius", health.temperature_celsius);
  add(facts, "power_watts", health.power_watts);
  add(facts, "power_limit_watts", health.power_limit_watts);
  if (health.other_processes) {
    facts["other_processes"] = health.other_processes->count;
    add(facts, "other_memory_bytes", health.other_processes->memory_bytes);
  }
  if (health.cores) {
    const auto seconds = [](std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); };
    facts["cores"] =
        py::dict("busy_seconds"_a = seconds(health.cores->busy), "own_seconds"_a = seconds(health.cores->ours),
                 "stolen_seconds"_a = seconds(health.cores->stolen));
  }
  if (health.quota) {
    facts["quota"] = py::dict("periods"_a = health.quota->total, "throttled"_a = health.quota->throttled);
  }
  if (!health.why_none.empty()) facts["why_no_health"] = health.why_none;
  return facts;
}

Facts device_health(const std::string& name) {
  DeviceHealth health;
  {
    const BlockingRegion region;  // loads a library, and a GPU may answer slowly
    health = health_of(find_device(name));
  }
  return facts_of(health);
}

}  // namespace

void bind_health(py::module_& module) {
  module.def("device_health", &device_health, "name"_a,
             R"(What a device's own sensors and counters say now: clocks, limits, temperature, power, other processes.

Unknown values are left out. If nothing is known, ``why_no_health`` says why.

Raises
------
InvalidArgument
    If there is no such device.)");
}

}  // namespace paceline::python
