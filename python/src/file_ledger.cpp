// SPDX-License-Identifier: Apache-2.0
#include "file_ledger.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <system_error>

#include <paceline/error.hpp>

namespace paceline::python {
namespace {

/// A ledger and the file it goes to.
struct FileLedger {
  explicit FileLedger(const std::filesystem::path& path) : file(path, std::ios::trunc), writer(file) {}
  std::ofstream file;
  balance::LedgerWriter writer;
};

}  // namespace

std::shared_ptr<balance::LedgerWriter> open_ledger(const char* call, const std::filesystem::path& path) {
  errno = 0;
  auto ledger = std::make_shared<FileLedger>(path);
  if (!ledger->file) {
    throw InvalidArgument(fmt::format("{}: {} cannot be opened for writing ({}); check the folder and the permissions",
                                      call, path.string(), std::generic_category().message(errno)));
  }
  // The first line may come later. A space in front of it shows whether there is room.
  if (!(ledger->file << ' ' << std::flush)) {
    throw InvalidArgument(fmt::format("{}: {} cannot be written to; is the disk full?", call, path.string()));
  }
  return {ledger, &ledger->writer};
}

}  // namespace paceline::python
