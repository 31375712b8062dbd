// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/device_group.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <new>
#include <unordered_set>
#include <utility>

#include <paceline/error.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/blocking.hpp>

#include "runtime/group_workers.hpp"
#include "runtime/worker_registry.hpp"

namespace paceline {
namespace {

std::vector<Device> checked(std::vector<Device> devices) {
  if (devices.empty()) {
    throw InvalidArgument("DeviceGroup: no devices given. Name at least one, e.g. \"host:0\"; devices() lists them.");
  }
  std::unordered_set<std::string> seen;
  for (const Device& device : devices) {
    if (!seen.insert(device.name).second) {
      throw InvalidArgument(
          fmt::format("DeviceGroup: {} is named twice. Each device has one worker: name it once.", device.name),
          device.name);
    }
  }
  return devices;
}

std::vector<Device> found(std::span<const std::string> names) {
  std::vector<Device> devices;
  for (const std::string& name : names) devices.push_back(find_device(name));
  return devices;
}

/// A call that one worker makes.
class CallSource final : public WorkSource {
 public:
  CallSource(std::function<void(const Device&)> call, std::function<void(const std::exception_ptr&)> fail)
      : call_(std::move(call)), fail_(std::move(fail)) {}

  [[nodiscard]] NextWork next(DeviceId, Clock::time_point) noexcept override {
    return taken_.exchange(true) ? NextWork::done() : NextWork::take(0);
  }
  void perform(DeviceId, std::int64_t, Turn& turn) override { call_(turn.device()); }
  void done(DeviceId, std::int64_t, const WorkTiming&) noexcept override { end(); }
  void failed(DeviceId, std::int64_t, std::exception_ptr error) noexcept override {
    fail_(error);
    end();
  }
  void cancel(std::exception_ptr reason) noexcept override {
    if (!taken_.exchange(true)) failed(0, 0, std::move(reason));
  }
  [[nodiscard]] bool complete() const noexcept override { return ended_; }

 private:
  void end() noexcept {
    call_ = nullptr;  // what it holds ends with the call, also where a late worker still holds the source
    ended_ = true;
    wake_caller();
  }

  std::function<void(const Device&)> call_;
  std::function<void(const std::exception_ptr&)> fail_;
  std::atomic<bool> taken_{false};
  std::atomic<bool> ended_{false};
};

// The open groups, for close_all(). Weak pointers, so that the list keeps no worker alive.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<internal::GroupWorkers>> groups;
};

// Never destroyed, because groups may be made and closed while static objects are being destroyed. In place, because
// close_all() may come first, when there is no memory.
Registry& registry() noexcept {
  alignas(Registry) static std::byte place[sizeof(Registry)];
  static auto* const instance = new (place) Registry;
  return *instance;
}

std::shared_ptr<internal::GroupWorkers> start(std::vector<Device> devices,
                                              std::shared_ptr<internal::GroupWorkers> whole = nullptr) {
  auto workers = std::make_shared<internal::GroupWorkers>(std::move(devices), std::move(whole));
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.groups, [](const auto& group) { return group.expired(); });
  all.groups.push_back(workers);
  return workers;
}

}  // namespace

void internal::throw_no_device(DeviceId id) {
  throw InvalidArgument(
      fmt::format("there is no device {} here; DeviceGroup::ids() has those of the group.", id.number()));
}

DeviceGroup DeviceGroup::all() {
  // GPUs first. Host devices beside GPUs would get next to nothing to do, and would take a core from a GPU's worker.
  for (const Backend* backend : backends()) {
    if (std::vector<Device> devices = backend->devices(); !devices.empty()) return DeviceGroup(std::move(devices));
  }
  throw Unavailable("DeviceGroup: this machine has no device at all");
}

DeviceGroup DeviceGroup::all(DeviceKind kind) {
  for (const Backend* backend : backends()) {
    if (backend->kind() != kind) continue;
    if (std::vector<Device> devices = backend->devices(); !devices.empty()) return DeviceGroup(std::move(devices));
    throw Unavailable(fmt::format("DeviceGroup: there are no {} devices: {}", backend->prefix(), backend->why_none()));
  }
  throw Unavailable("DeviceGroup: this build has no backend for such devices");
}

DeviceGroup::DeviceGroup(std::vector<Device> devices) : workers_(start(checked(std::move(devices)))) {}
DeviceGroup::DeviceGroup(std::span<const std::string> names) : DeviceGroup(found(names)) {}
DeviceGroup::~DeviceGroup() = default;
DeviceGroup::DeviceGroup(const DeviceGroup&) = default;
DeviceGroup& DeviceGroup::operator=(const DeviceGroup&) = default;

std::size_t DeviceGroup::size() const noexcept { return workers_->devices().size(); }
const std::vector<Device>& DeviceGroup::devices() const noexcept { return workers_->devices(); }
const std::vector<DeviceId>& DeviceGroup::ids() const noexcept { return workers_->ids(); }
const Device& DeviceGroup::device(DeviceId id) const { return devices()[place(id)]; }

DeviceId DeviceGroup::id(std::string_view name) const {
  std::vector<std::string_view> names;
  for (const Device& device : devices()) {
    if (device.name == name) return ids()[names.size()];
    names.push_back(device.name);
  }
  throw InvalidArgument(fmt::format("the group has no device {}; it has {}", name, fmt::join(names, ", ")));
}

std::size_t DeviceGroup::place(DeviceId id) const {
  const std::size_t place = internal::place_of(ids(), id);
  if (place == size()) internal::throw_no_device(id);
  return place;
}

bool DeviceGroup::asynchronous() const {
  return std::any_of(devices().begin(), devices().end(),
                     [](const Device& device) { return backend_of(device).asynchronous(); });
}

DeviceGroup DeviceGroup::share() const {
  workers_->check_usable("share");
  DeviceGroup share = *this;
  share.workers_ = start(devices(), workers_);
  workers_->add_share(share.workers_);
  return share;
}

void DeviceGroup::open(const std::shared_ptr<WorkSource>& source, const OpenOptions& options,
                       std::span<const DeviceId> devices) {
  workers_->open(source, options, devices);
}

void DeviceGroup::submit(const std::shared_ptr<WorkSource>& source) { workers_->open(source, {.gang = true}, {}); }

void DeviceGroup::open_call(std::function<void(const Device&)> call,
                            std::function<void(const std::exception_ptr&)> fail, int priority) {
  open(std::make_shared<CallSource>(std::move(call), std::move(fail)), {.priority = priority});
}

bool DeviceGroup::wait(WorkSource& source, const Between& between) {
  const auto signal = source.signal_;
  const auto done = [&] { return source.over(); };
  for (;;) {
    {
      const BlockingRegion region;
      if (workers_->await(done, [&] { return signal->wait_for(internal::kBetweenInterval, done); })) break;
    }
    if (between && !between()) return source.complete();
  }
  if (source.complete()) return true;
  throw Cancelled("wait: the device group was closed before this work began, so it never will. Make a new group.");
}

bool DeviceGroup::run(const std::shared_ptr<WorkSource>& source, const Between& between) {
  submit(source);
  return wait(*source, between);
}

bool DeviceGroup::replace_worker(DeviceId device, const WorkSource& source) {
  (void)place(device);
  return workers_->replace_worker(device, source);
}

bool DeviceGroup::busy() const noexcept { return workers_->busy(); }
void DeviceGroup::close(std::chrono::nanoseconds timeout, const Between& between) { workers_->close(timeout, between); }
bool DeviceGroup::closed() const noexcept { return workers_->closed(); }

void DeviceGroup::close_all(std::chrono::nanoseconds timeout) noexcept {
  // Takes one after the other off the list, because there may be no memory for a list of them.
  const auto take = []() -> std::shared_ptr<internal::GroupWorkers> {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    while (!all.groups.empty()) {
      std::shared_ptr<internal::GroupWorkers> workers = all.groups.back().lock();
      all.groups.pop_back();
      if (workers != nullptr) return workers;
    }
    return nullptr;
  };
  while (const std::shared_ptr<internal::GroupWorkers> workers = take()) {
    try {
      workers->close(timeout);
    } catch (...) {
      // the workers were left behind, as documented; nothing else can be done for them now
    }
  }
  // Workers that an earlier close() left behind may be about to end.
  internal::WorkerRegistry::of_process().await_left_behind(timeout);
}

}  // namespace paceline
