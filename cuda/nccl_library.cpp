// SPDX-License-Identifier: Apache-2.0
#include "nccl_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>

#include <paceline/comm/nccl_info.hpp>
#include <paceline/error.hpp>

namespace paceline::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr const char* kVariable = "PACELINE_NCCL_LIBRARY";
constexpr const char* kCure =
    "Install one with `pip install nvidia-nccl-cu13`, or name its file in "
    "PACELINE_NCCL_LIBRARY.";

struct Known {
  std::mutex mutex;
  std::string installed_path;
  std::unique_ptr<const Library> library;
};

// Leaked on purpose, because communicators may outlive static objects.
Known& known() {
  static auto* const instance = new Known;
  return *instance;
}

std::string last_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

template <class F>
void find(void* handle, const std::string& path, F*& function, const char* name) {
  function = reinterpret_cast<F*>(dlsym(handle, name));
  if (function != nullptr) return;
  throw Unavailable(
      fmt::format("NCCL: {} has no function {}: it is damaged, or no NCCL. Install NCCL {} or newer, or name another "
                  "file in {}.",
                  path, name, version_text(kOldestVersion), kVariable));
}

std::string file_of(void* function, const std::string& asked_for) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return asked_for;
  return info.dli_fname;
}

/// Keeps `handle` open for good, because NCCL has threads of its own.
Library take(void* handle, const std::string& asked_for) {
  GetVersion* get_version = nullptr;
  find(handle, asked_for, get_version, "ncclGetVersion");
  Library library;
  library.path = file_of(reinterpret_cast<void*>(get_version), asked_for);
  const Result result = get_version(&library.version);
  if (result != kSuccess) {
    throw Unavailable(
        fmt::format("NCCL: {} does not tell its version (error {})", library.path, static_cast<int>(result)));
  }
  if (library.version < kOldestVersion) {
    throw Unavailable(
        fmt::format("NCCL: {} is version {}, and {} or newer is needed. Update the package it belongs to (PyTorch "
                    "brings its own), or name a newer file in {} before anything else loads NCCL.",
                    library.path, version_text(library.version), version_text(kOldestVersion), kVariable));
  }
  find(handle, library.path, library.get_error_string, "ncclGetErrorString");
  find(handle, library.path, library.get_last_error, "ncclGetLastError");
  find(handle, library.path, library.get_unique_id, "ncclGetUniqueId");
  find(handle, library.path, library.comm_init_rank_config, "ncclCommInitRankConfig");
  find(handle, library.path, library.comm_destroy, "ncclCommDestroy");
  find(handle, library.path, library.comm_abort, "ncclCommAbort");
  find(handle, library.path, library.comm_get_async_error, "ncclCommGetAsyncError");
  find(handle, library.path, library.group_start, "ncclGroupStart");
  find(handle, library.path, library.group_end, "ncclGroupEnd");
  find(handle, library.path, library.all_reduce, "ncclAllReduce");
  find(handle, library.path, library.broadcast, "ncclBroadcast");
  find(handle, library.path, library.reduce, "ncclReduce");
  return library;
}

Library look(const std::string& installed_path) {
  if (void* const loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return take(loaded, kSoname);
  // The named file is used or fails. Another copy would hide its failure.
  if (const char* const named = std::getenv(kVariable); named != nullptr && *named != '\0') return open_library(named);
  std::string tried;
  if (!installed_path.empty()) {
    if (void* const handle = dlopen(installed_path.c_str(), RTLD_NOW | RTLD_LOCAL)) return take(handle, installed_path);
    tried = last_error() + "; ";
  }
  if (void* const handle = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL)) return take(handle, kSoname);
  throw Unavailable(fmt::format("NCCL was not found ({}{}). {}", tried, last_error(), kCure));
}

}  // namespace

Library open_library(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Unavailable(fmt::format("NCCL: {} cannot be loaded: {}. {}", path, last_error(), kCure));
  return take(handle, path);
}

const Library& library() {
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  if (all.library == nullptr) all.library = std::make_unique<const Library>(look(all.installed_path));
  return *all.library;
}

void set_installed_path(std::string path) {
  Known& all = known();
  const std::lock_guard lock(all.mutex);
  all.installed_path = std::move(path);
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace paceline::nccl

namespace paceline {

NcclInfo nccl_info() {
  try {
    const nccl::Library& library = nccl::library();
    return {.version = nccl::version_text(library.version), .path = library.path, .why_none = {}};
  } catch (const Unavailable& error) {
    return {.version = {}, .path = {}, .why_none = error.what()};
  }
}

void set_nccl_path(const std::string& path) { nccl::set_installed_path(path); }

}  // namespace paceline
