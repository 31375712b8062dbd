// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include <paceline/runtime/device.hpp>

#include "runtime/worker.hpp"

namespace paceline::internal {

/// The workers of this process: one for each GPU, and one for each host device of the same cores, however many groups
/// use it. The last group that leaves a worker ends it. A worker that does not come back is left behind, and another
/// one takes its place.
///
/// Its lock also orders all gangs. Who opens one holds it, so that any two gangs come in the same order to all workers
/// that they share. Otherwise each could hold a worker that the other one waits for.
class WorkerRegistry {
 public:
  /// A forked child has none of its parent's workers.
  static WorkerRegistry& of_process() noexcept;

  [[nodiscard]] std::mutex& mutex() noexcept { return mutex_; }

  /// The worker of that device, which is started if nobody uses the device. The caller is one more user.
  /// @throws std::system_error if its thread cannot be started.
  [[nodiscard]] std::shared_ptr<Worker> join(const Device& device);
  /// One user of the device less. A worker of it, `first` or one that took its place, that is still inside of a source
  /// of that group is left behind. After the last user the worker is stopped and returned, for its thread to be joined
  /// or left behind. Otherwise null.
  [[nodiscard]] std::shared_ptr<Worker> leave(const std::shared_ptr<Worker>& first, std::uint64_t group) noexcept;
  /// Somebody has waited in vain for the worker, or is the worker. Its thread is detached. What waits for its turn
  /// there, and all users, get another worker.
  void leave_behind(const std::shared_ptr<Worker>& worker) noexcept;
  /// Leaves a worker of that device, `first` or one that took its place, in the work of `source` that it is in. Another
  /// one takes its place, with all that it has begun or that waits there. False if it is in no such work. For who holds
  /// the lock.
  /// @throws std::system_error if no thread can be started.
  bool replace_inside(const std::shared_ptr<Worker>& first, const WorkSource& source);
  /// Waits until every other worker that was left behind has ended, or the time is over.
  void await_left_behind(std::chrono::nanoseconds timeout) noexcept;
  /// For who holds the lock and uses the device: the worker that has the place of `worker` now, which is itself if it
  /// was not left behind.
  /// @throws std::system_error if one has to be started and cannot.
  [[nodiscard]] std::shared_ptr<Worker> present(std::shared_ptr<Worker> worker);

 private:
  struct Entry {
    std::shared_ptr<Worker> worker;
    int users = 0;
  };

  WorkerRegistry();
  [[nodiscard]] std::vector<Entry>::iterator entry_of(const Device& device) noexcept;
  /// Puts another worker in the place of the entry's, which hands over all that it has not begun and ends when it comes
  /// back. If that fails, nothing has changed.
  void replace_worker(Entry& entry);
  void put_in_place(Entry& entry, const std::shared_ptr<Worker>& next, std::list<Worker::Open> sources);
  void detach(const std::shared_ptr<Worker>& worker) noexcept;
  void note_own_cores() noexcept;

  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<Worker>> left_behind_;
};

}  // namespace paceline::internal
