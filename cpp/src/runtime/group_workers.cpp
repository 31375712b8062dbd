// SPDX-License-Identifier: Apache-2.0
#include "runtime/group_workers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <list>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/deadline.hpp"
#include "runtime/start_timeout.hpp"
#include "runtime/worker_registry.hpp"

namespace paceline::internal {

struct GroupWorkers::State {
  static std::uint64_t next_number() noexcept {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }

  /// A device's worker. Others may have taken its place since (Worker::successor()), with what it had not begun.
  struct Place {
    std::shared_ptr<Worker> first;
    std::shared_ptr<Worker> ending = nullptr;  // the last one, which this group ends
    bool late = false;                         // not done in time with what this group gave it
  };
  std::uint64_t number = next_number();  // by which workers know what is this group's
  PerDevice<Place> places;
  // Guarded by the registry's lock. Their workers own the sources: one that is gone is complete.
  std::vector<std::weak_ptr<WorkSource>> gangs;
  std::vector<std::weak_ptr<WorkSource>> others;
  std::vector<std::weak_ptr<GroupWorkers>> shares;
};

namespace {

std::mutex& order() noexcept { return WorkerRegistry::of_process().mutex(); }

/// That the group was closed, or that there is no memory to say so.
std::exception_ptr why_cancelled() noexcept {
  try {
    throw Cancelled("the device group was closed");
  } catch (...) {
    return std::current_exception();
  }
}

/// Those of a new group.
std::vector<DeviceId> first_ids(std::size_t count) {
  std::vector<DeviceId> ids;
  while (ids.size() < count) ids.emplace_back(ids.size());
  return ids;
}

bool runs_on(const Device& device, int core) {
  return std::find(device.cores.begin(), device.cores.end(), core) != device.cores.end();
}

template <class List>
void make_room(List& list) {
  std::erase_if(list, [](const auto& one) { return one.expired(); });
  list.reserve(list.size() + 1);
}

/// Whether one of the list, which `order()` guards, fulfils the condition. From the back, since make_room() moves what
/// is left to the front. None is destroyed under the lock, because its destructor may wait for who waits for the lock.
template <class T, class Condition>
bool any_of(const std::vector<std::weak_ptr<T>>& list, Condition condition) {
  for (std::size_t next = std::numeric_limits<std::size_t>::max();;) {
    std::shared_ptr<T> one;
    {
      const std::lock_guard lock(order());
      next = std::min(next, list.size());
      if (next == 0) return false;
      one = list[--next].lock();
    }
    if (one != nullptr && condition(*one)) return true;
  }
}

}  // namespace

GroupWorkers::GroupWorkers(std::vector<Device> devices, std::shared_ptr<GroupWorkers> whole, pid_t owner)
    : devices_(std::move(devices)),
      ids_(whole != nullptr ? whole->ids() : first_ids(devices_.size())),
      whole_(std::move(whole)),
      owner_(owner),
      state_(new State) {}

// The other constructor has made the object, so the destructor leaves what it has joined if this one throws.
GroupWorkers::GroupWorkers(std::vector<Device> devices, std::shared_ptr<GroupWorkers> whole)
    : GroupWorkers(std::move(devices), std::move(whole), getpid()) {
  state_->places.reserve(ids_.size());
  for (const DeviceId id : ids_) {
    const Device& device = devices_[state_->places.size()];
    try {
      state_->places.add(id, {WorkerRegistry::of_process().join(device)});
    } catch (const std::system_error& error) {
      throw Unavailable(fmt::format("DeviceGroup: no worker thread could be started for {} ({}). Raise the limit on "
                                    "threads (ulimit -u, or pids.max of the cgroup).",
                                    device.name, error.what()),
                        device.name);
    }
  }
  await_ready();
}

// A worker that does not start within the timeout means a machine in trouble.
void GroupWorkers::await_ready() {
  const std::chrono::seconds timeout = start_timeout(devices_);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (const auto& [id, one] : state_->places) {
    while (!one.first->ready()) {
      if (std::chrono::steady_clock::now() > deadline) {
        const Device& device = one.first->device();
        throw Timeout(late_start(device, timeout), device.name);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

bool GroupWorkers::forked() const noexcept { return getpid() != owner_; }

GroupWorkers::~GroupWorkers() {
  if (forked()) return;  // the threads exist only in the parent: joining them, or even locking, could hang
  try {
    close(std::chrono::seconds(10));
  } catch (...) {
    // stuck workers were left behind
  }
  delete state_;
}

void GroupWorkers::check_usable(const char* call) const {
  if (forked()) {
    throw Unavailable(
        fmt::format("{}: this device group belongs to process {}, and threads do not survive fork(). Make a new group "
                    "in this process, or start workers with the 'spawn' method.",
                    call, owner_));
  }
  if (closed_) throw Unavailable(fmt::format("{}: the device group is closed. Make a new one.", call));
}

void GroupWorkers::add_share(const std::shared_ptr<GroupWorkers>& share) {
  const std::lock_guard lock(order());
  check_usable("share");
  make_room(state_->shares);
  state_->shares.push_back(share);
}

void GroupWorkers::open(const std::shared_ptr<WorkSource>& source, const OpenOptions& options,
                        std::span<const DeviceId> devices) {
  if (const Device* const here = Turn::of_this_thread(); options.gang && here != nullptr) {
    throw InvalidArgument(
        fmt::format(
            "A step was begun by a piece of work on {}, such as the loss_fn of another step. No step or collective "
            "may begin inside another one, whatever its devices: each could wait for the other. Call it before that "
            "step or after it.",
            here->name),
        here->name);
  }
  if (forked()) check_usable("open");  // before any lock
  std::vector<DeviceId> ids;
  for (const DeviceId id : devices) {
    if (state_->places.find(id) == nullptr) {
      throw InvalidArgument(fmt::format("open: there is no device {} in a group of {}.", id.number(), devices_.size()));
    }
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  if (devices.empty()) ids = ids_;
  const std::lock_guard lock(order());
  check_usable("open");
  // What may throw comes first: a source that only some of the workers have would never be complete.
  std::fenv_t rounding;
  std::fegetenv(&rounding);
  std::vector<std::pair<std::shared_ptr<Worker>, std::list<Worker::Open>>> given(ids.size());
  WorkSource::Workers workers;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    given[i].first = WorkerRegistry::of_process().present(state_->places[ids[i]].first);
    given[i].second.push_back({source, state_->number, ids[i], options.priority, options.gang, rounding});
    workers.emplace_back(ids[i], given[i].first);
  }
  auto& list = options.gang ? state_->gangs : state_->others;
  make_room(list);
  source->attach(std::move(workers), ids);
  list.push_back(source);
  // The worker of this core comes last. The system may run it in place of this thread, and the other workers would then
  // wait.
  const int core = sched_getcpu();
  for (const bool here : {false, true}) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (runs_on(state_->places[ids[i]].first->device(), core) == here)
        given[i].first->open(std::move(given[i].second), core);
    }
  }
}

bool GroupWorkers::replace_worker(DeviceId device, const WorkSource& source) {
  if (forked()) check_usable("replace_worker");  // before any lock
  const std::lock_guard lock(order());
  return !closed_ && WorkerRegistry::of_process().replace_inside(state_->places[device].first, source);
}

bool GroupWorkers::on_a_workers_core() const noexcept {
  const int core = sched_getcpu();
  return std::any_of(devices_.begin(), devices_.end(),
                     [&](const Device& device) { return device.cores.empty() || runs_on(device, core); });
}

bool GroupWorkers::busy() const noexcept {
  if (forked() || closed_) return false;
  return any_of(state_->gangs, [](const WorkSource& source) { return !source.complete(); }) ||
         any_of(state_->shares, [](const GroupWorkers& share) { return share.busy(); });
}

void GroupWorkers::close(std::chrono::nanoseconds timeout, const std::function<bool()>& between) {
  if (forked()) return;
  {
    // Under the lock, because a source that is being opened would reach only some of the workers.
    const std::lock_guard lock(order());
    if (closed_.exchange(true)) return;
  }
  bool patient = true;  // also of the next share
  const auto ask = [&] { return std::exchange(patient, false) && (patient = !between || between()); };
  std::exception_ptr first;
  any_of(state_->shares, [&](GroupWorkers& share) {
    try {
      share.close(timeout, ask);
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
    return false;
  });
  close_own(timeout, ask);
  if (first != nullptr) std::rethrow_exception(first);
}

/// Whether a worker of that device, the first or one that took its place, has still something to do for this group.
/// This thread does not wait for itself: it is a worker's own if that worker has destroyed the last handle.
bool GroupWorkers::needs(Worker& first) const noexcept {
  const std::lock_guard lock(order());
  for (Worker* one = &first; one != nullptr; one = one->successor().get()) {
    if (!one->is_this_thread() && one->needed_by(state_->number)) return true;
  }
  return false;
}

void GroupWorkers::close_own(std::chrono::nanoseconds timeout, const std::function<bool()>& between) {
  WorkerRegistry& registry = WorkerRegistry::of_process();
  PerDevice<State::Place>& places = state_->places;
  any_of(state_->others, [](WorkSource& source) {
    source.cancel(why_cancelled());
    source.wake_all();  // so that every worker lets go of it, whomever cancel() has woken
    return false;
  });
  using Clock = std::chrono::steady_clock;
  bool patient = true;
  std::exception_ptr thrown;
  const auto wait_until = [&](const auto& done) {
    const Clock::time_point end = Clock::now() + bounded(timeout);
    while (!done()) {
      const Clock::time_point look_up = std::min(end, Clock::now() + kBetweenInterval);
      {
        const BlockingRegion region;
        while (!done() && Clock::now() < look_up) std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      if (!patient || Clock::now() >= end) return done();
      try {
        patient = !between || between();
      } catch (...) {
        thrown = std::current_exception();
        patient = false;
      }
      if (!patient) return done();
    }
    return true;
  };
  const Clock::time_point begin = Clock::now();
  const auto needed = [&](const auto& entry) { return needs(*entry.value.first); };
  // A source may end before its worker takes it in, and is not needed then. While the worker takes it in, needed() is
  // true again for a moment. So the answer of this wait counts.
  const bool in_time = wait_until([&] { return std::ranges::none_of(places, needed); });
  const std::chrono::duration<double> waited = Clock::now() - begin;
  bool late = false;
  for (auto& entry : places) late |= entry.value.late = !in_time && needed(entry);
  for (const auto* list : {&state_->gangs, &state_->others}) {
    if (!late) break;
    any_of(*list, [](WorkSource& source) {
      source.withdraw(why_cancelled());
      return false;
    });
  }
  // It was a user until here, so that nobody else ends the workers and waits for what this group gave them.
  for (auto& [id, one] : places) one.ending = registry.leave(one.first, state_->number);
  for (auto& [id, one] : places) {
    if (one.ending == nullptr) continue;
    if (!one.ending->is_this_thread() && wait_until([&] { return one.ending->exited(); })) {
      const BlockingRegion region;  // the ending thread may need the interpreter for its clean-up
      one.ending->thread().join();
    } else {
      registry.leave_behind(one.ending);  // with what a group that is closed has left there
    }
  }
  // Every thread is joined or left behind, so from here on an exception leaves nothing undone.
  if (thrown != nullptr) std::rethrow_exception(thrown);
  if (!late) return;
  std::vector<std::string> names;
  for (const auto& [id, one] : places) {
    if (one.late) names.push_back(one.first->device().name);
  }
  throw Timeout(fmt::format("close: what this group gave to {} was not done within {:.1f} s. What no worker had begun "
                            "is cancelled. Workers that are still at the rest were left behind.",
                            fmt::join(names, ", "), waited.count()),
                names.front());
}

}  // namespace paceline::internal
