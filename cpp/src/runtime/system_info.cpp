// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/system_info.hpp>

#include <string_view>

#include <fmt/format.h>

#include "runtime/text_file.hpp"

namespace paceline {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

// From the predefined macros, because they are right for every build system.
#if defined(__OPTIMIZE__)
constexpr const char* kOptimized = "optimized";
#else
constexpr const char* kOptimized = "not optimized";
#endif
#if defined(NDEBUG)
constexpr const char* kAssertions = "without assertions";
#else
constexpr const char* kAssertions = "with assertions";
#endif
#if defined(__x86_64__)
constexpr const char* kProcessor = "x86-64";
#elif defined(__aarch64__)
constexpr const char* kProcessor = "aarch64";
#else
constexpr const char* kProcessor = "another processor";
#endif

}  // namespace

BuildInfo build_info() {
  return {.version = PACELINE_VERSION,
          .compiler = kCompiler,
          .flags = fmt::format("C++ {}, {}, {}, {}", __cplusplus / 100 % 100, kOptimized, kAssertions, kProcessor),
          .fmt_version = fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)};
}

std::string read_cpu_model(const std::filesystem::path& root) {
  const auto text = internal::read_text_file(root / "proc/cpuinfo");
  if (!text) return {};
  for (const std::string_view line : internal::split(*text, '\n')) {
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;
    const std::string_view key = internal::trim(line.substr(0, colon));
    if (key == "model name" || key == "Model" || key == "cpu model") {  // x86; Arm and RISC-V boards; MIPS
      return std::string(internal::trim(line.substr(colon + 1)));
    }
  }
  return {};
}

}  // namespace paceline
