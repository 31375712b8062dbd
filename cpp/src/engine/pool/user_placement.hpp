// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include <paceline/plan/pool_types.hpp>

namespace paceline::internal {

/// Asks the user's placement without the pool's mutex, since that function may take any lock, an interpreter's too.
///
/// plan::PoolState asks look_up() under the mutex, which knows only the answers of this round. What it does not know is
/// asked afterwards, by one thread at a time, and then plan::PoolState decides once more. An answer counts if the job
/// and the idle devices are the same as in the question.
class UserPlacement {
 public:
  using Choose = std::function<std::optional<std::size_t>(const plan::PoolQuestion&)>;

  // Under the pool's mutex:
  [[nodiscard]] Choose look_up(Choose choose);
  /// Whether there is a question about a job that still waits, and this thread is now the one that asks the user. It
  /// then calls ask(), answer() and next() in turn, until next() is false or put_off().
  [[nodiscard]] bool begin(const std::function<bool(plan::JobId)>& waits);
  /// Whether a question is not yet asked.
  [[nodiscard]] bool open() const noexcept { return open_ != nullptr; }
  /// Whether a thread asks the user now.
  [[nodiscard]] bool asking() const noexcept { return asking_; }
  /// `last`: the pool is closed, so a job does not wait where nothing runs.
  void answer(std::optional<std::size_t> device, bool last);
  /// Whether there is another question. If not, the round is over.
  [[nodiscard]] bool next();
  /// Leaves the round to another thread, although next() was true: begin() is then true for that one.
  void put_off();
  /// Whether an answer of the last round was to wait.
  [[nodiscard]] bool waits() const noexcept { return waits_; }
  /// A sentence about answers that failed; empty if none has.
  [[nodiscard]] std::string explain() const;

  /// Without the mutex: asks the user. If that throws, the answer is the fastest idle device.
  [[nodiscard]] std::optional<std::size_t> ask() noexcept;

 private:
  struct Question;  // one that stays when the mutex is free
  void end();
  [[nodiscard]] std::optional<std::size_t> known(const plan::PoolQuestion& asked);

  Choose choose_ = {};
  std::unordered_map<plan::JobId, std::shared_ptr<Question>> answers_ = {};  // of this round
  std::shared_ptr<Question> open_ = {};
  std::shared_ptr<Question> current_ = {};  // of the thread that asks
  std::string error_ = {};                  // of that thread
  bool asking_ = false;
  bool waits_ = false;
  std::int64_t failures_ = 0;
  std::string last_failure_ = {};
};

}  // namespace paceline::internal
