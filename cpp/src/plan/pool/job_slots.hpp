// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <paceline/plan/pool_types.hpp>

namespace paceline::plan {

inline constexpr double kNever = std::numeric_limits<double>::infinity();
inline constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

/// A job that has not ended.
struct PoolEntry {
  enum class Phase : std::uint8_t { held, in_line, in_gangs, runs };  ///< held: not due, or blocked by others

  JobId id{};
  std::size_t kind = 0;
  std::size_t need = 0;
  std::int64_t gang = 1;
  double submitted = 0.0;
  double due = 0.0;
  double deadline = kNever;
  double key = 0.0;
  double cost = 1.0;
  double charge = 1.0;                                           // what its tenant pays
  std::int64_t blockers = 0;                                     // jobs that it is after, and that have not ended
  std::int64_t most = std::numeric_limits<std::int64_t>::max();  // jobs in its batch, after a failure
  std::size_t line = 0;                                          // where it waits, in_line
  std::vector<JobId> dependents = {};
  bool background = false;
  bool arrived = false;  // PoolLoad::arrived counts it
  Phase phase = Phase::held;
  Priority priority = Priority::normal;
  std::uint32_t tenant = 0;

  [[nodiscard]] bool timed() const noexcept { return deadline < kNever; }
  [[nodiscard]] bool limited() const noexcept { return most < std::numeric_limits<std::int64_t>::max(); }
};

/// Jobs by their ids, in slots that are used again. An id is the number of the submission and, in its lower bits, the
/// slot. So a job is found without hashing, and those of a batch, which came together, lie together.
class JobSlots {
 public:
  static constexpr unsigned kSlotBits = 22;
  static constexpr std::uint64_t kSlotMask = (std::uint64_t{1} << kSlotBits) - 1;

  explicit JobSlots(std::size_t limit = kSlotMask + 1) : limit_(limit) {}

  /// The id of a submission. It need not be added.
  [[nodiscard]] JobId next() noexcept {
    const std::size_t slot = free_.empty() ? slots_.size() : free_.back();
    return JobId{++submissions_ << kSlotBits | (slot & kSlotMask)};
  }
  /// Of the submission, from 1.
  [[nodiscard]] static constexpr std::uint64_t number(JobId id) noexcept {
    return static_cast<std::uint64_t>(id) >> kSlotBits;
  }
  [[nodiscard]] bool submitted(JobId id) const noexcept { return number(id) > 0 && number(id) <= submissions_; }
  [[nodiscard]] bool full() const noexcept { return free_.empty() && slots_.size() >= limit_; }

  /// A job whose id is the last one of next(). References to other jobs are valid no longer.
  PoolEntry& add(PoolEntry job) {
    if (free_.empty()) return slots_.emplace_back(std::move(job));
    PoolEntry& slot = slots_[free_.back()];
    free_.pop_back();
    return slot = std::move(job);
  }
  void erase(PoolEntry& job) {
    job.id = JobId{};
    free_.push_back(static_cast<std::uint32_t>(&job - slots_.data()));
  }

  [[nodiscard]] PoolEntry* find(JobId id) noexcept {
    const std::size_t slot = slot_of(id);
    return slot < slots_.size() && slots_[slot].id == id && id != JobId{} ? &slots_[slot] : nullptr;
  }
  /// Where a job is in slots().
  [[nodiscard]] static std::size_t slot_of(JobId id) noexcept { return static_cast<std::uint64_t>(id) & kSlotMask; }
  /// Requires that it is there.
  [[nodiscard]] PoolEntry& at(JobId id) noexcept { return slots_[slot_of(id)]; }
  [[nodiscard]] const PoolEntry& at(JobId id) const noexcept { return slots_[slot_of(id)]; }
  /// Those whose id is JobId{} are free.
  [[nodiscard]] const std::vector<PoolEntry>& slots() const noexcept { return slots_; }

 private:
  std::vector<PoolEntry> slots_;
  std::vector<std::uint32_t> free_;
  std::uint64_t submissions_ = 0;
  std::size_t limit_;
};

}  // namespace paceline::plan
