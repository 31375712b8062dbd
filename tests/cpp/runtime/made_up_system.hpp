// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace paceline {

/// A made-up /proc and /sys in a temporary directory.
class MadeUpSystem {
 public:
  MadeUpSystem() {
    static std::atomic<int> count{0};
    root = std::filesystem::temp_directory_path() /
           ("paceline_system_" + std::to_string(::getpid()) + "_" + std::to_string(count.fetch_add(1)));
    std::filesystem::create_directories(root);
  }
  ~MadeUpSystem() {
    std::error_code ignored;
    std::filesystem::remove_all(root, ignored);
  }
  MadeUpSystem(const MadeUpSystem&) = delete;
  MadeUpSystem& operator=(const MadeUpSystem&) = delete;

  const MadeUpSystem& file(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
    return *this;
  }

  std::filesystem::path root;
};

}  // namespace paceline
