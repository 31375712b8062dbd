// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/system_info.hpp>

#include <string_view>

#include <fmt/format.h>

#include "runtime/text_file.hpp"

namespace paceline {
namespace {

std::string compiler_name() {
#if defined(__clang__)
  return fmt::format("Clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#elif defined(__GNUC__)
  return fmt::format("GCC {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#else
  return "unknown";
#endif
}

// From the predefined macros, because they are right for every build system.
std::string code_flags() {
  std::string flags;
  const auto add = [&flags](std::string_view flag) {
    if (!flags.empty()) flags += ", ";
    flags += flag;
  };
  add(fmt::format("C++ {}", __cplusplus / 100 % 100));
#if defined(__OPTIMIZE__)
  add("optimized");
#else
  add("not optimized");
#endif
#if defined(NDEBUG)
  add("without assertions");
#else
  add("with assertions");
#endif
#if defined(__x86_64__)
  add("x86-64");
#elif defined(__aarch64__)
  add("aarch64");
#endif
  return flags;
}

}  // namespace

BuildInfo build_info() {
  return {.version = PACELINE_VERSION,
          .compiler = compiler_name(),
          .flags = code_flags(),
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
