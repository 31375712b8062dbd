// SPDX-License-Identifier: Apache-2.0
#include "runtime/group_workers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/deadline.hpp"

namespace paceline {

namespace detail {

void TaskSignal::wake() noexcept {
  // Taking the lock orders the wake-up after a waiter that has just seen "not done" and is about to sleep.
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

void Mailbox::post(std::shared_ptr<GroupTask> task, int callers_core) {
  {
    const std::lock_guard lock(mutex_);
    task_ = std::move(task);  // an earlier task that this worker never came to is complete: it is dropped here
    callers_core_.store(callers_core, std::memory_order_relaxed);
    full_.store(true, std::memory_order_release);
  }
  changed_.notify_one();
}

void Mailbox::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    full_.store(true, std::memory_order_release);
  }
  changed_.notify_one();
}

std::shared_ptr<GroupTask> Mailbox::take(bool own_core) {
  const auto full = [this] { return full_.load(std::memory_order_acquire); };
  const bool callers = callers_core_.load(std::memory_order_relaxed) == sched_getcpu();
  wait_.until(own_core && !callers, full, [&] {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, full);
    return true;
  });
  const std::lock_guard lock(mutex_);
  full_.store(stopped_, std::memory_order_relaxed);
  return std::exchange(task_, nullptr);
}

}  // namespace detail

GroupTask::GroupTask() : signal_(std::make_shared<detail::TaskSignal>()) {}
GroupTask::~GroupTask() = default;

void GroupTask::wake_caller() noexcept { signal_->wake(); }

void GroupTask::leave() noexcept {
  const auto signal = signal_;  // the task may be gone once the caller sees that everybody has left
  const std::size_t expected = expected_.load(std::memory_order_relaxed);
  if (left_.fetch_add(1, std::memory_order_acq_rel) + 1 == expected) signal->wake();
}

struct GroupWorkers::Threads {
  std::mutex mutex;                  // one submit or close at a time
  std::weak_ptr<GroupTask> current;  // its submitter's and its workers'; gone means complete
  std::vector<std::shared_ptr<detail::Mailbox>> mailboxes;
  std::vector<std::thread> threads;

  [[nodiscard]] bool busy() const {
    const std::shared_ptr<GroupTask> task = current.lock();
    return task != nullptr && !task->complete();
  }
};

namespace {

constexpr std::chrono::seconds kStartTimeout{10};
constexpr std::chrono::milliseconds kBetweenInterval{50};

/// Threads that nobody can join any more.
struct LeftBehind {
  std::mutex mutex;
  pid_t owner = 0;  // a forked child has none of its parent's threads
  std::vector<std::shared_ptr<detail::Mailbox>> mailboxes;
};

// Leaked on purpose: the end of the program asks for them.
LeftBehind& left_behind() {
  static auto* instance = new LeftBehind;
  return *instance;
}

void remember(const std::shared_ptr<detail::Mailbox>& mailbox) {
  LeftBehind& all = left_behind();
  const std::lock_guard lock(all.mutex);
  if (all.owner != getpid()) all.mailboxes.clear();
  all.owner = getpid();
  std::erase_if(all.mailboxes, [](const auto& known) { return known->exited.load(); });
  all.mailboxes.push_back(mailbox);
}

bool runs_on(const Device& device, int core) {
  return std::find(device.cores.begin(), device.cores.end(), core) != device.cores.end();
}

/// Whether it is pinned, and where no other device's worker is.
bool has_own_cores(const std::vector<Device>& devices, const Device& device) {
  return !device.cores.empty() && std::all_of(devices.begin(), devices.end(), [&](const Device& other) {
    return &other == &device || (!other.cores.empty() && std::none_of(device.cores.begin(), device.cores.end(),
                                                                      [&](int core) { return runs_on(other, core); }));
  });
}

void work(const Device& device, std::size_t device_index, bool own_cores,
          const std::shared_ptr<detail::Mailbox>& mailbox, void (*leave)(GroupTask&)) {
  backend_of(device).prepare_worker(device);
  pthread_setname_np(pthread_self(), fmt::format("pl {}", device.name).substr(0, 15).c_str());
  mailbox->ready.store(true);
  while (const std::shared_ptr<GroupTask> task = mailbox->take(own_cores)) {
    task->run(device_index);
    leave(*task);
  }
}

}  // namespace

GroupWorkers::GroupWorkers(std::vector<Device> devices)
    : devices_(std::move(devices)), owner_(getpid()), threads_(new Threads) {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    auto mailbox = std::make_shared<detail::Mailbox>();
    threads_->mailboxes.push_back(mailbox);
    try {
      const bool own_cores = has_own_cores(devices_, devices_[i]);
      threads_->threads.emplace_back([device = devices_[i], i, own_cores, mailbox] {
        work(device, i, own_cores, mailbox, [](GroupTask& task) { task.leave(); });
        mailbox->exited.store(true);
      });
    } catch (const std::system_error& error) {
      close(std::chrono::seconds(10));
      delete threads_;
      throw Unavailable(fmt::format("DeviceGroup: no worker thread could be started for {} ({}). Raise the limit on "
                                    "threads (ulimit -u, or pids.max of the cgroup).",
                                    devices_[i].name, error.what()),
                        devices_[i].name);
    }
  }
  try {
    await_ready();
  } catch (const Error&) {
    for (std::thread& thread : threads_->threads) thread.detach();
    for (auto& mailbox : threads_->mailboxes) mailbox->stop();
    delete threads_;
    throw;
  }
}

// Our own handshake, so it has a deadline: a worker that cannot even start is a machine in trouble, and is named.
void GroupWorkers::await_ready() {
  const auto deadline = std::chrono::steady_clock::now() + kStartTimeout;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    while (!threads_->mailboxes[i]->ready.load()) {
      if (std::chrono::steady_clock::now() > deadline) {
        throw Timeout(
            fmt::format(
                "DeviceGroup: the worker of {} did not start within {} s. Is another process holding its core {} "
                "at a real-time priority?",
                devices_[i].name, kStartTimeout.count(), fmt::join(devices_[i].cores, ", ")),
            devices_[i].name);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

bool GroupWorkers::forked() const noexcept { return getpid() != owner_; }

GroupWorkers::~GroupWorkers() {
  if (forked()) return;  // the threads exist only in the parent: joining, or even locking, could hang
  try {
    close(std::chrono::seconds(10));
  } catch (const Error&) {
    // Stuck workers were left behind; a destructor has nobody to tell.
  }
  delete threads_;
}

void GroupWorkers::require_alive(const char* call) const {
  if (forked()) {
    throw Unavailable(
        fmt::format("{}: this device group belongs to process {}, and threads do not survive fork(). Make "
                    "a new group in this process, or start workers with the 'spawn' method.",
                    call, owner_));
  }
}

void GroupWorkers::submit(const std::shared_ptr<GroupTask>& task) {
  require_alive("submit");
  const std::lock_guard lock(threads_->mutex);
  if (closed_) throw Unavailable("submit: the device group is closed. Make a new one.");
  if (threads_->busy()) {
    throw InvalidArgument(
        "submit: the group's workers are still at an earlier task. A group runs one task at a time: "
        "wait for it, or use a second group.");
  }
  task->expected_.store(devices_.size(), std::memory_order_relaxed);
  threads_->current = task;
  // Whom the system lets run in the caller's place comes last, or the others would wait for its work to end.
  const int core = sched_getcpu();
  for (const bool here : {false, true}) {
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      if (runs_on(devices_[i], core) == here) threads_->mailboxes[i]->post(task, core);
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
  {
    // Not while a task is being handed out: some workers would have it, and others never come to it.
    const std::lock_guard lock(threads_->mutex);
    if (closed_.exchange(true)) return;
    for (auto& mailbox : threads_->mailboxes) mailbox->stop();
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto waited = [&] { return std::chrono::steady_clock::now() - begin; };
  bool patient = true;
  std::vector<std::string> stuck;
  for (std::size_t i = 0; i < threads_->threads.size(); ++i) {
    std::thread& thread = threads_->threads[i];
    if (thread.get_id() == std::this_thread::get_id()) {  // the last handle was dropped by a worker itself
      thread.detach();
      continue;
    }
    const std::atomic<bool>& exited = threads_->mailboxes[i]->exited;
    while (!exited.load() && patient && waited() < timeout) {
      const auto look_up = std::chrono::steady_clock::now() + kBetweenInterval;
      {
        const BlockingRegion region;
        while (!exited.load() && waited() < timeout && std::chrono::steady_clock::now() < look_up) {
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
      }
      patient = !between || between();
    }
    if (exited.load()) {
      const BlockingRegion region;  // what the thread cleans up as it ends may need the interpreter
      thread.join();
    } else {
      thread.detach();
      remember(threads_->mailboxes[i]);
      stuck.push_back(devices_[i].name);
    }
  }
  {
    const std::lock_guard lock(threads_->mutex);
    threads_->current.reset();
  }
  if (!stuck.empty()) {
    throw Timeout(
        fmt::format("close: the workers of {} did not come back within {:.1f} s and were left behind; they are "
                    "still at what they were given.",
                    fmt::join(stuck, ", "), std::chrono::duration<double>(waited()).count()),
        stuck.front());
  }
}

void GroupWorkers::await_left_behind(std::chrono::nanoseconds timeout) {
  std::vector<std::shared_ptr<detail::Mailbox>> mailboxes;
  {
    LeftBehind& all = left_behind();
    const std::lock_guard lock(all.mutex);
    if (all.owner == getpid()) mailboxes = all.mailboxes;
  }
  const auto deadline = std::chrono::steady_clock::now() + internal::bounded(timeout);
  const BlockingRegion region;
  for (const auto& mailbox : mailboxes) {
    while (!mailbox->exited.load() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

}  // namespace paceline
