// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

// Checked before the file is opened, because opening empties it, and it may be the ledger of this very pool.
void PoolCore::write_ledger(const std::filesystem::path& path) {
  check_process("write_ledger");
  const std::lock_guard lock(mutex_);
  if (state_.writes_ledger()) {
    throw InvalidArgument("write_ledger: this pool writes a ledger already. Nothing was written.");
  }
  if (state_.begun()) {
    throw InvalidArgument(
        "write_ledger: called after the first job, or after a device was retired, and a ledger that lacks events "
        "cannot be replayed. Call it right after making the pool. Nothing was written.");
  }
  errno = 0;
  auto file = std::make_shared<std::ofstream>(path, std::ios::trunc);
  if (!*file) {
    throw InvalidArgument(
        fmt::format("write_ledger: {} cannot be opened for writing ({}); check the folder and the permissions",
                    path.string(), std::generic_category().message(errno)));
  }
  state_.write_to(std::move(file));
  if (state_.ledger_failed()) {
    throw InvalidArgument(fmt::format(
        "write_ledger: {} cannot be written to; is the disk full? The pool goes on without a ledger.", path.string()));
  }
}

}  // namespace paceline::internal
