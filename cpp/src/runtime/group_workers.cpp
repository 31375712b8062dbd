// SPDX-License-Identifier: Apache-2.0
#include "runtime/group_workers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <cstddef>
#include <exception>
#include <limits>
#include <list>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/worker_registry.hpp"

namespace paceline {

using internal::Worker;
using internal::WorkerRegistry;

struct GroupWorkers::Seats {
  struct One {
    std::shared_ptr<Worker> worker;
    std::shared_ptr<internal::Seat> seat;
    bool left_behind = false;  // by the close() of this group
  };
  std::vector<One> all;  // by DeviceId
  // Guarded by the registry's lock. Their workers own the sources: one that is gone is complete.
  std::vector<std::weak_ptr<WorkSource>> gangs;
  std::vector<std::weak_ptr<WorkSource>> others;
  std::vector<std::weak_ptr<GroupWorkers>> shares;
};

namespace {

constexpr std::chrono::seconds kStartTimeout{10};

std::mutex& order() noexcept { return WorkerRegistry::of_process().mutex(); }

/// That the group was closed, or that there is no memory to say so.
std::exception_ptr why_cancelled() noexcept {
  try {
    throw Cancelled("the device group was closed");
  } catch (...) {
    return std::current_exception();
  }
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
    : devices_(std::move(devices)), whole_(std::move(whole)), owner_(owner), seats_(new Seats) {}

// The other constructor has made the object, so the destructor leaves what it has joined if this one throws.
GroupWorkers::GroupWorkers(std::vector<Device> devices, std::shared_ptr<GroupWorkers> whole)
    : GroupWorkers(std::move(devices), std::move(whole), getpid()) {
  seats_->all.reserve(devices_.size());
  for (const Device& device : devices_) {
    auto seat = std::make_shared<internal::Seat>();
    try {
      seats_->all.push_back({WorkerRegistry::of_process().join(device), std::move(seat)});
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
  const auto deadline = std::chrono::steady_clock::now() + kStartTimeout;
  for (const Seats::One& one : seats_->all) {
    while (!one.worker->ready()) {
      if (std::chrono::steady_clock::now() > deadline) {
        const Device& device = one.worker->device();
        throw Timeout(
            fmt::format(
                "DeviceGroup: the worker of {} did not start within {} s. Is another process holding its core {} "
                "at a real-time priority?",
                device.name, kStartTimeout.count(), fmt::join(device.cores, ", ")),
            device.name);
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
  delete seats_;
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
  make_room(seats_->shares);
  seats_->shares.push_back(share);
}

void GroupWorkers::open(const std::shared_ptr<WorkSource>& source, const OpenOptions& options,
                        std::span<const DeviceId> devices) {
  if (const Device* const here = Turn::of_this_thread(); options.gang && here != nullptr) {
    throw InvalidArgument(
        fmt::format(
            "A step was begun by a piece of work on {}, such as the loss_fn of another step. It would wait for the "
            "worker that it is called on, since each device has one worker. Call it before that step or after it.",
            here->name),
        here->name);
  }
  if (forked()) check_usable("open");  // before any lock
  std::vector<DeviceId> ids;
  for (const DeviceId id : devices) {
    if (id >= devices_.size()) {
      throw InvalidArgument(fmt::format("open: there is no device {} in a group of {}.", id, devices_.size()));
    }
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  for (DeviceId id = 0; devices.empty() && id < devices_.size(); ++id) ids.push_back(id);
  const std::lock_guard lock(order());
  check_usable("open");
  // What may throw comes first: a source that only some of the workers have would never be complete.
  std::fenv_t rounding;
  std::fegetenv(&rounding);
  std::vector<std::list<Worker::Open>> given(ids.size());
  WorkSource::Workers workers;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Seats::One& one = seats_->all[ids[i]];
    if (one.worker->left_behind()) {  // by another group
      auto seat = std::make_shared<internal::Seat>();
      one = {WorkerRegistry::of_process().present(one.worker), std::move(seat)};
    }
    given[i].push_back({source, one.seat, ids[i], options.priority, options.gang, rounding});
    workers.emplace_back(ids[i], one.worker);
  }
  auto& list = options.gang ? seats_->gangs : seats_->others;
  make_room(list);
  source->attach(std::move(workers), ids);
  list.push_back(source);
  // The worker of this core comes last. The system may run it in place of this thread, and the other workers would then
  // wait.
  const int core = sched_getcpu();
  for (const bool here : {false, true}) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (runs_on(devices_[ids[i]], core) == here) seats_->all[ids[i]].worker->open(std::move(given[i]), core);
    }
  }
}

bool GroupWorkers::on_a_workers_core() const noexcept {
  const int core = sched_getcpu();
  return std::any_of(devices_.begin(), devices_.end(),
                     [&](const Device& device) { return device.cores.empty() || runs_on(device, core); });
}

bool GroupWorkers::busy() const noexcept {
  if (forked() || closed_) return false;
  return any_of(seats_->gangs, [](const WorkSource& source) { return !source.complete(); }) ||
         any_of(seats_->shares, [](const GroupWorkers& share) { return share.busy(); });
}

void GroupWorkers::close(std::chrono::nanoseconds timeout, const std::function<bool()>& between) {
  if (forked()) return;
  {
    // Under the lock, because a source that is being opened would reach only some of the workers.
    const std::lock_guard lock(order());
    if (closed_.exchange(true)) return;
  }
  std::exception_ptr first;
  any_of(seats_->shares, [&](GroupWorkers& share) {
    try {
      share.close(timeout, between);
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
    return false;
  });
  close_own(timeout, between);
  if (first != nullptr) std::rethrow_exception(first);
}

void GroupWorkers::close_own(std::chrono::nanoseconds timeout, const std::function<bool()>& between) {
  WorkerRegistry& registry = WorkerRegistry::of_process();
  any_of(seats_->others, [](WorkSource& source) {
    source.cancel(why_cancelled());
    return false;
  });
  std::vector<Seats::One>& seats = seats_->all;
  std::size_t ending = 0;  // the seats from here on are those of workers that others use, too
  for (std::size_t i = 0; i < seats.size(); ++i) {
    std::shared_ptr<Worker> last = registry.leave(*seats[i].worker);
    if (last == nullptr) continue;
    seats[i].worker = std::move(last);
    std::swap(seats[i], seats[ending++]);
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - begin; };
  bool patient = true;
  std::exception_ptr thrown;
  for (std::size_t i = 0; i < seats.size(); ++i) {
    const auto& [worker, seat, _] = seats[i];
    const bool ends = i < ending;
    if (!ends && worker->left_behind()) continue;
    std::thread& thread = worker->thread();
    const bool own = thread.get_id() == std::this_thread::get_id();  // a worker destroyed the last handle
    const auto gone = [&] { return ends ? worker->exited() : !worker->needed_by(*seat); };
    while (!own && !gone() && patient && waited() < timeout) {
      const auto look_up = std::chrono::steady_clock::now() + kBetweenInterval;
      {
        const BlockingRegion region;
        while (!gone() && waited() < timeout && std::chrono::steady_clock::now() < look_up) {
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
      }
      try {
        patient = !between || between();
      } catch (...) {
        thrown = std::current_exception();
        patient = false;
      }
    }
    if (own || gone()) {
      if (!ends) continue;
      const BlockingRegion region;  // the ending thread may need the interpreter for its clean-up
      own ? thread.detach() : thread.join();
    } else if (ends || worker->inside(*seat)) {
      registry.leave_behind(worker);
      seats[i].left_behind = true;
    }
  }
  // Every thread is joined or left behind, so from here on an exception leaves nothing undone.
  std::vector<std::string> stuck;
  for (const Seats::One& one : seats) {
    if (one.left_behind && !one.worker->exited()) stuck.push_back(one.worker->device().name);
  }
  if (thrown != nullptr) std::rethrow_exception(thrown);
  if (!stuck.empty()) {
    throw Timeout(
        fmt::format("close: the workers of {} did not come back within {:.1f} s and were left behind; they are "
                    "still at what they were given.",
                    fmt::join(stuck, ", "), std::chrono::duration<double>(waited()).count()),
        stuck.front());
  }
}

}  // namespace paceline
