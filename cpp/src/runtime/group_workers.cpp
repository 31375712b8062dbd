// SPDX-License-Identifier: Apache-2.0
#include "runtime/group_workers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <list>
#include <new>
#include <system_error>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/deadline.hpp"

namespace paceline {

struct GroupWorkers::Threads {
  std::mutex mutex;                                    // taken by open() and close()
  std::weak_ptr<WorkSource> step;                      // owned by its workers; expired means complete
  std::vector<std::weak_ptr<WorkSource>> gap_sources;  // sources of priority below 0
  std::vector<std::shared_ptr<internal::Worker>> workers;

  [[nodiscard]] bool busy() const {
    const std::shared_ptr<WorkSource> source = step.lock();
    return source != nullptr && !source->complete();
  }
};

namespace {

constexpr std::chrono::seconds kStartTimeout{10};

/// Workers whose threads were detached.
struct LeftBehind {
  std::mutex mutex;
  pid_t owner = 0;  // a forked child has none of its parent's threads
  std::vector<std::shared_ptr<internal::Worker>> workers;
};

// Never destroyed, because the end of the program uses it, and in place, because there may be no memory by then.
LeftBehind& left_behind() noexcept {
  alignas(LeftBehind) static std::byte place[sizeof(LeftBehind)];
  static auto* const instance = new (place) LeftBehind;
  return *instance;
}

void remember(const std::shared_ptr<internal::Worker>& worker) {
  LeftBehind& all = left_behind();
  const std::lock_guard lock(all.mutex);
  if (all.owner != getpid()) all.workers.clear();
  all.owner = getpid();
  std::erase_if(all.workers, [](const auto& known) { return known->exited(); });
  all.workers.push_back(worker);
}

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

/// Whether the device is pinned to cores that no other device's worker may run on.
bool has_own_cores(const std::vector<Device>& devices, const Device& device) {
  return !device.cores.empty() && std::all_of(devices.begin(), devices.end(), [&](const Device& other) {
    return &other == &device || (!other.cores.empty() && std::none_of(device.cores.begin(), device.cores.end(),
                                                                      [&](int core) { return runs_on(other, core); }));
  });
}

}  // namespace

GroupWorkers::GroupWorkers(std::vector<Device> devices, pid_t owner)
    : devices_(std::move(devices)), owner_(owner), threads_(new Threads) {}

// The other constructor has made the object, so the destructor ends what has started if this one throws.
GroupWorkers::GroupWorkers(std::vector<Device> devices) : GroupWorkers(std::move(devices), getpid()) {
  threads_->workers.reserve(devices_.size());
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    auto worker = std::make_shared<internal::Worker>(devices_[i], i, has_own_cores(devices_, devices_[i]));
    try {
      worker->start();
    } catch (const std::system_error& error) {
      throw Unavailable(fmt::format("DeviceGroup: no worker thread could be started for {} ({}). Raise the limit on "
                                    "threads (ulimit -u, or pids.max of the cgroup).",
                                    devices_[i].name, error.what()),
                        devices_[i].name);
    }
    threads_->workers.push_back(std::move(worker));
  }
  await_ready();
}

// A worker that does not start within the timeout means a machine in trouble.
void GroupWorkers::await_ready() {
  const auto deadline = std::chrono::steady_clock::now() + kStartTimeout;
  for (const auto& worker : threads_->workers) {
    while (!worker->ready()) {
      if (std::chrono::steady_clock::now() > deadline) {
        const Device& device = worker->device();
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
  delete threads_;
}

void GroupWorkers::open(const std::shared_ptr<WorkSource>& source, int priority, std::span<const DeviceId> devices) {
  if (forked()) {
    throw Unavailable(fmt::format(
        "open: this device group belongs to process {}, and threads do not survive fork(). Make a new group "
        "in this process, or start workers with the 'spawn' method.",
        owner_));
  }
  const std::lock_guard lock(threads_->mutex);
  if (closed_) throw Unavailable("open: the device group is closed. Make a new one.");
  std::vector<bool> asks(devices_.size(), devices.empty());
  for (const DeviceId d : devices) {
    if (d >= devices_.size()) {
      throw InvalidArgument(fmt::format("open: there is no device {} in a group of {}.", d, devices_.size()));
    }
    asks[d] = true;
  }
  if (priority >= 0 && threads_->busy()) {
    throw InvalidArgument(
        "submit: the group's workers are still at an earlier task. A group runs one task at a time: "
        "wait for it, or use a second group.");
  }
  // What may throw comes first: a source that only some of the workers have would never be complete.
  std::vector<std::list<internal::Worker::Open>> given(devices_.size());
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (asks[i]) given[i].push_back({source, priority});
  }
  if (priority < 0) {
    std::erase_if(threads_->gap_sources, [](const auto& one) { return one.expired(); });
    threads_->gap_sources.reserve(threads_->gap_sources.size() + 1);
  }
  source->attach({threads_->workers.begin(), threads_->workers.end()}, asks);
  if (priority >= 0) {
    threads_->step = source;
  } else {
    threads_->gap_sources.push_back(source);
  }
  // The worker of this core comes last. The system may run it in place of this thread, and the other workers would then
  // wait.
  const int core = sched_getcpu();
  for (const bool here : {false, true}) {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      if (runs_on(devices_[i], core) == here && asks[i]) threads_->workers[i]->open(std::move(given[i]), core);
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
  const std::lock_guard lock(threads_->mutex);
  return threads_->busy();
}

void GroupWorkers::close(std::chrono::nanoseconds timeout, const std::function<bool()>& between) {
  if (forked()) return;
  std::vector<std::weak_ptr<WorkSource>> gap_sources;
  {
    // Under the lock, because a source that is being opened would reach only some of the workers.
    const std::lock_guard lock(threads_->mutex);
    if (closed_.exchange(true)) return;
    gap_sources.swap(threads_->gap_sources);
  }
  for (const auto& one : gap_sources) {
    if (const auto source = one.lock()) source->cancel(why_cancelled());
  }
  for (const auto& worker : threads_->workers) worker->stop();
  const auto begin = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - begin; };
  bool patient = true;
  std::exception_ptr thrown;
  const internal::Worker* own = nullptr;  // a worker destroyed the last handle
  for (const auto& worker : threads_->workers) {
    std::thread& thread = worker->thread();
    if (thread.get_id() == std::this_thread::get_id()) own = worker.get();
    while (worker.get() != own && !worker->exited() && patient && waited() < timeout) {
      const auto look_up = std::chrono::steady_clock::now() + kBetweenInterval;
      {
        const BlockingRegion region;
        while (!worker->exited() && waited() < timeout && std::chrono::steady_clock::now() < look_up) {
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
    if (worker->exited()) {
      const BlockingRegion region;  // the ending thread may need the interpreter for its clean-up
      thread.join();
    } else {
      thread.detach();
    }
  }
  // Every thread is joined or detached, so from here on an exception leaves nothing undone.
  std::vector<std::string> stuck;
  for (const auto& worker : threads_->workers) {
    if (worker.get() == own || worker->exited()) continue;
    remember(worker);
    stuck.push_back(worker->device().name);
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

void GroupWorkers::await_left_behind(std::chrono::nanoseconds timeout) noexcept {
  const auto all_exited = [] {
    LeftBehind& all = left_behind();
    const std::lock_guard lock(all.mutex);
    return all.owner != getpid() || std::ranges::all_of(all.workers, [](const auto& one) { return one->exited(); });
  };
  const auto deadline = std::chrono::steady_clock::now() + internal::bounded(timeout);
  const BlockingRegion region;
  while (!all_exited() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace paceline
