// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/step.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include <paceline/error.hpp>

#include "counted.hpp"
#include "engine/claim_state.hpp"
#include "engine/item_claims.hpp"
#include "runtime/short_wait.hpp"

namespace paceline {

StepProgram::~StepProgram() = default;
void StepProgram::pace(std::size_t) {}
void StepProgram::catch_up(std::size_t) {}
void StepProgram::finish(std::size_t) {}
void StepProgram::stop() noexcept {}
void StepProgram::stamp(std::vector<ClaimRecord>&) const {}
bool StepProgram::settled() const { return true; }
void StepProgram::settle() const {}
std::unique_ptr<BlockReduction> StepProgram::reduction() { return nullptr; }

namespace {

std::unique_ptr<engine::Claims> make_claims(StepOptions options) {
  if (options.items == nullptr) return std::make_unique<engine::ClaimState>(std::move(options));
  return std::make_unique<engine::ItemClaims>(options.items, options.stealing, options.any_size, options.least_items);
}

}  // namespace

/// The step as the workers see it. Held by each worker until it has left, so a worker that wakes late still finds its
/// state.
class Step::Task final : public GroupTask {
 public:
  Task(const DeviceGroup& group, std::shared_ptr<StepProgram> program, StepOptions options)
      : program_(std::move(program)),
        lanes_(group.size()),
        asynchronous_(group.asynchronous()),
        scripted_(!options.script.empty()) {
    for (std::size_t d = 0; d < lanes_.size(); ++d) {
      lanes_[d].takes_part = options.script.empty() ? options.shares[d] > 0 : !options.script[d].empty();
    }
    claims_ = make_claims(std::move(options));
  }

  void start_clock() { start_ = std::chrono::steady_clock::now(); }

  void run(std::size_t device) noexcept override {
    if (lanes_[device].takes_part && enter()) {
      compute(device);
      leave();
    }
    if (await_computed() != kReducing) return;
    if ((reduction_ == nullptr || reduction_->work()) && !over_.exchange(true, std::memory_order_acq_rel)) {
      settle();
    }
  }

  [[nodiscard]] bool complete() const noexcept override { return settled_.load(std::memory_order_acquire); }

  void fail(std::exception_ptr error, const std::optional<MicroBatch>& micro_batch) noexcept {
    {
      const std::lock_guard lock(failure_mutex_);
      if (decided_) return;  // too late: the results are being written
      if (!failure_) failure_ = StepFailure{std::move(error), micro_batch};
      program_->stop();  // under the lock: once the step is over the program may go
    }
    claims_->cancel();
  }

  [[nodiscard]] const StepFailure* failure() const noexcept { return failure_ ? &*failure_ : nullptr; }

  [[nodiscard]] StepRecord record() const {
    StepRecord record;
    double first = reduced_at_;
    double last = 0.0;
    for (const Lane& lane : lanes_) record.claims.insert(record.claims.end(), lane.claims.begin(), lane.claims.end());
    program_->stamp(record.claims);
    for (const ClaimRecord& claim : record.claims) {
      first = std::min(first, claim.start_seconds);
      last = std::max(last, claim.finish_seconds);
    }
    record.compute_seconds = std::max(0.0, last - first);
    if (!asynchronous_) {
      record.reduce_seconds = std::max(0.0, reduced_at_ - last);
      if (!scripted_) record.startup_seconds = startups(first, record.compute_seconds);
    }
    // Devices that work after the call may be at it when the host is done.
    record.step_seconds = std::max(reduced_at_, record.compute_seconds);
    return record;
  }

  [[nodiscard]] std::vector<std::int64_t> items() const {
    std::vector<std::int64_t> items(lanes_.size(), 0);
    for (std::size_t d = 0; d < lanes_.size(); ++d) {
      for (const ClaimRecord& claim : lanes_[d].claims) items[d] += claim.micro_batch.size();
    }
    return items;
  }

  [[nodiscard]] const StepProgram& program() const noexcept { return *program_; }

 private:
  // A worker writes only its own lane; the barrier publishes it. Padded, so that neighbours do not share a cache line.
  struct alignas(64) Lane {
    std::vector<ClaimRecord> claims;
    bool takes_part = true;
  };
  static constexpr std::uint32_t kClosed = std::uint32_t{1} << 31;  // of inside_: nobody enters any more
  static constexpr int kComputing = 0;
  static constexpr int kReducing = 1;
  static constexpr int kFailed = 2;

  [[nodiscard]] double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  [[nodiscard]] std::vector<std::optional<double>> startups(double first, double compute_seconds) const {
    std::vector<std::optional<double>> seconds;
    for (const Lane& lane : lanes_) {
      if (!lane.claims.empty()) {
        seconds.emplace_back(lane.claims.front().start_seconds - first);
      } else {
        seconds.push_back(lane.takes_part ? std::optional(compute_seconds) : std::nullopt);
      }
    }
    return seconds;
  }

  /// False: all is done, or others are at the last of it. A worker that the system wakes late holds nobody up.
  [[nodiscard]] bool enter() noexcept {
    std::uint32_t inside = inside_.load(std::memory_order_relaxed);
    do {
      if ((inside & kClosed) != 0) return false;
    } while (!inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel));
    return true;
  }

  /// Whoever leaves last when nothing is left to claim opens the reduction. If something is left, it is for a worker
  /// that has yet to enter.
  void leave() noexcept {
    if (inside_.fetch_sub(1, std::memory_order_acq_rel) != 1 || !claims_->exhausted()) return;
    std::uint32_t nobody = 0;
    if (inside_.compare_exchange_strong(nobody, kClosed, std::memory_order_acq_rel)) open_reduction();
  }

  void compute(std::size_t device) noexcept {
    MicroBatch current{.device_index = device};
    try {
      program_->pace(device);
      for (;;) {
        const double time = now();
        const auto next = claims_->claim(device, time);
        if (!next) {
          if (!claims_->asks_again(device)) break;
          program_->catch_up(device);
          continue;
        }
        current = *next;
        const bool excluded = program_->run(current);
        const double finish = now();
        current.items = {};  // they end with the step, the record does not
        lanes_[device].claims.push_back({current, time, finish, excluded});
        program_->pace(device);
      }
      current = MicroBatch{.device_index = device};
      program_->finish(device);
    } catch (...) {
      fail(std::current_exception(), current);
    }
  }

  [[nodiscard]] bool has_failed() noexcept {
    const std::lock_guard lock(failure_mutex_);
    return failure_.has_value();
  }

  void open_reduction() noexcept {
    if (!has_failed()) {
      try {
        reduction_ = program_->reduction();
      } catch (...) {
        fail(std::current_exception(), std::nullopt);
      }
    }
    int phase = kReducing;
    {
      const std::lock_guard lock(failure_mutex_);
      decided_ = true;
      if (failure_) phase = kFailed;
    }
    {
      const std::lock_guard lock(phase_mutex_);
      phase_.store(phase, std::memory_order_release);
    }
    computed_.notify_all();
    if (phase == kFailed) settle();
  }

  /// The phase once it is no longer kComputing. Not by std::atomic::wait: libstdc++ yields four times before it sleeps,
  /// each time giving a busy program on the same core a whole slice, milliseconds.
  [[nodiscard]] int await_computed() noexcept {
    constexpr int looks = 100;  // some microseconds: between devices that are done at the same time
    for (int i = 0; i < looks && phase_.load(std::memory_order_acquire) == kComputing; ++i) detail::relax();
    if (phase_.load(std::memory_order_acquire) == kComputing) {
      std::unique_lock lock(phase_mutex_);
      computed_.wait(lock, [this] { return phase_.load(std::memory_order_acquire) != kComputing; });
    }
    return phase_.load(std::memory_order_acquire);
  }

  void settle() noexcept {
    {
      const std::lock_guard lock(failure_mutex_);
      reduced_at_ = now();
      settled_.store(true, std::memory_order_release);
    }
    wake_caller();
  }

  std::shared_ptr<StepProgram> program_;
  std::unique_ptr<BlockReduction> reduction_;
  std::unique_ptr<engine::Claims> claims_;
  std::vector<Lane> lanes_;
  bool asynchronous_;
  bool scripted_;
  std::chrono::steady_clock::time_point start_{};
  std::atomic<std::uint32_t> inside_{0};  // workers in compute(), and kClosed
  std::atomic<int> phase_{kComputing};
  std::mutex phase_mutex_;
  std::condition_variable computed_;
  std::atomic<bool> over_{false};
  std::atomic<bool> settled_{false};
  double reduced_at_ = 0.0;  // published by settled_
  std::mutex failure_mutex_;
  bool decided_ = false;  // whether it failed; under the lock
  std::optional<StepFailure> failure_;
};

namespace {

// Every item once, or gradients would be silently wrong.
void check_script(const StepOptions& options) {
  if (options.script.size() != options.shares.size()) {
    throw InvalidArgument(fmt::format("step: a script for {} in a group of {}; one list for each is needed.",
                                      counted(options.script.size(), "device"), options.shares.size()));
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const auto& lane : options.script) {
    for (const MicroBatch& micro_batch : lane) spans.emplace_back(micro_batch.begin, micro_batch.end);
  }
  std::sort(spans.begin(), spans.end());
  std::int64_t covered = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != covered || end <= begin) {
      throw InvalidArgument(
          fmt::format("step: the script has items [{}, {}) where item {} is the next; each item must be there once.",
                      begin, end, covered));
    }
    covered = end;
  }
  const std::int64_t batch = std::accumulate(options.shares.begin(), options.shares.end(), std::int64_t{0});
  if (covered != batch) {
    throw InvalidArgument(fmt::format("step: the script has {} for a batch of {}.", counted(covered, "item"), batch));
  }
}

void check(const DeviceGroup& group, const StepOptions& options) {
  const std::size_t count = group.size();
  if (options.shares.size() != count) {
    throw InvalidArgument(fmt::format("step: {} for a group of {}; one share per device is needed.",
                                      counted(options.shares.size(), "share"), counted(count, "device")));
  }
  if (std::any_of(options.shares.begin(), options.shares.end(), [](std::int64_t share) { return share < 0; })) {
    throw InvalidArgument("step: a share is negative. Shares are item counts, zero or more.");
  }
  if (std::all_of(options.shares.begin(), options.shares.end(), [](std::int64_t share) { return share == 0; })) {
    throw InvalidArgument("step: the batch is empty. Skip the step instead.");
  }
  if ((!options.models.empty() && options.models.size() != count) ||
      (!options.noise.empty() && options.noise.size() != count)) {
    throw InvalidArgument(
        fmt::format("step: models and noise need one entry for each of the {} devices, or none.", count));
  }
  if (!options.run_ahead.empty() && options.run_ahead.size() != count) {
    throw InvalidArgument(fmt::format("step: run_ahead needs one entry for each of the {} devices, or none.", count));
  }
  if (!options.script.empty()) check_script(options);
  if (options.items != nullptr && options.items->item_shares != options.shares) {
    throw InvalidArgument("step: the shares are not those of the items' plan; pass its item_shares.");
  }
  if (options.micro_batch < 0 || options.granularity < 1 || options.least_items < 1) {
    throw InvalidArgument("step: micro_batch must be 0 (planned) or more, granularity and least_items 1 or more.");
  }
}

}  // namespace

Step::Step(DeviceGroup group, std::shared_ptr<StepProgram> program, StepOptions options) : group_(std::move(group)) {
  check(group_, options);
  task_ = std::make_shared<Task>(group_, std::move(program), std::move(options));
}

Step::~Step() = default;

void Step::start() {
  task_->start_clock();
  group_.submit(task_);
}

bool Step::wait(const DeviceGroup::Between& between) { return group_.wait(*task_, between); }

void Step::cancel() { canceller()(); }

std::function<void()> Step::canceller() const {
  return [task = std::weak_ptr<Task>(task_)] {
    if (const std::shared_ptr<Task> alive = task.lock()) {
      alive->fail(std::make_exception_ptr(Cancelled("step: cancelled before it was done; nothing was committed.")),
                  std::nullopt);
    }
  };
}

const StepFailure* Step::failure() const noexcept { return task_->failure(); }
std::vector<std::int64_t> Step::items() const { return task_->items(); }
bool Step::settled() const { return task_->program().settled(); }
void Step::settle() const { task_->program().settle(); }
StepRecord Step::record() const { return task_->record(); }

balance::StepTimings StepRecord::timings(std::size_t device_count) const {
  balance::StepTimings timings{.devices = std::vector<std::vector<balance::MicroBatchTiming>>(device_count),
                               .step_seconds = compute_seconds,
                               .reduction_seconds = reduce_seconds,
                               .startup_seconds = startup_seconds};
  for (const ClaimRecord& claim : claims) {
    timings.devices[claim.micro_batch.device_index].push_back(
        {claim.micro_batch.size(), claim.finish_seconds - claim.start_seconds, claim.excluded});
  }
  return timings;
}

std::vector<std::int64_t> StepRecord::items(std::size_t device_count) const {
  std::vector<std::int64_t> items(device_count, 0);
  for (const ClaimRecord& claim : claims) items[claim.micro_batch.device_index] += claim.micro_batch.size();
  return items;
}

namespace {

/// Throws an error of the type of the exception that is being handled, and nests that in it.
[[noreturn]] void throw_of_this_type(const std::string& message, const std::string& device) {
  try {
    throw;
  } catch (const InvalidArgument&) {
    std::throw_with_nested(InvalidArgument(message, device));
  } catch (const Unavailable&) {
    std::throw_with_nested(Unavailable(message, device));
  } catch (const Timeout&) {
    std::throw_with_nested(Timeout(message, device));
  } catch (const OutOfMemory&) {
    std::throw_with_nested(OutOfMemory(message, device));
  } catch (const std::bad_alloc&) {
    std::throw_with_nested(OutOfMemory(message, device));
  } catch (const DeviceLost&) {
    std::throw_with_nested(DeviceLost(message, device));
  } catch (...) {
    std::throw_with_nested(Error(message, device));
  }
}

}  // namespace

void Step::rethrow_failure() const {
  const StepFailure* failure = task_->failure();
  if (failure == nullptr) return;
  const std::optional<MicroBatch>& at = failure->micro_batch;
  const std::string device = at ? group_.devices()[at->device_index].name : "";
  const bool at_items = at && at->size() > 0;
  const auto message = [&](const char* what) {
    const std::string where = at_items ? fmt::format("{} failed at items [{}, {})", device, at->begin, at->end)
                                       : fmt::format("{} failed", at ? device : "the reduction");
    return fmt::format("step: {}: {}. Nothing was committed.", where, what);
  };
  try {
    std::rethrow_exception(failure->error);
  } catch (const Cancelled&) {
    throw;
  } catch (const Error& error) {
    // It may be another device's, which this one waited for.
    const std::string& named = error.device().empty() ? device : error.device();
    throw_of_this_type(at_items || error.device().empty()
                           ? message(error.what())
                           : fmt::format("step: {}. Nothing was committed.", error.what()),
                       named);
  } catch (const std::exception& error) {
    throw_of_this_type(message(error.what()), device);
  } catch (...) {
    throw_of_this_type(message("an exception that is no std::exception"), device);
  }
}

StepRecord run_step(const DeviceGroup& group, const std::shared_ptr<StepProgram>& program, StepOptions options,
                    const DeviceGroup::Between& between) {
  Step step(group, program, std::move(options));
  step.start();
  if (!step.wait(between)) {
    step.cancel();
    step.wait();
  }
  step.rethrow_failure();
  step.settle();
  return step.record();
}

}  // namespace paceline
