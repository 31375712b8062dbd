// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>

#include <paceline/export.hpp>

namespace paceline {

/// How this library was built, for bug reports and benchmark records.
struct BuildInfo {
  std::string version;      ///< "0.1.0"
  std::string compiler;     ///< "GCC 12.2.0"
  std::string flags;        ///< what the code can tell of itself: "C++ 20, optimized, without assertions, x86-64"
  std::string fmt_version;  ///< "12.2.0"
};

[[nodiscard]] PACELINE_API BuildInfo build_info();

/// The processor's name from /proc/cpuinfo below `root`; empty when the system does not tell.
[[nodiscard]] PACELINE_API std::string read_cpu_model(const std::filesystem::path& root = "/");

}  // namespace paceline
