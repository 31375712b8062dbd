// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/step.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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
#include "runtime/deadline.hpp"

namespace paceline {

StepProgram::~StepProgram() = default;
const Event* StepProgram::slot(std::size_t) { return nullptr; }
const Event* StepProgram::idle(std::size_t) { return nullptr; }
std::chrono::nanoseconds StepProgram::patience() const { return std::chrono::nanoseconds::max(); }
void StepProgram::give_up(const Event&) {}
void StepProgram::finish(std::size_t) {}
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

/// The step as the workers see it: a source of micro-batches, and at the end of the reduction. Held by each worker
/// until it has left, so a worker that wakes late still finds its state.
class Step::Source final : public WorkSource {
 public:
  Source(const DeviceGroup& group, std::shared_ptr<StepProgram> program, StepOptions options)
      : program_(std::move(program)),
        lanes_(group.size()),
        asynchronous_(group.asynchronous()),
        scripted_(!options.script.empty()) {
    for (std::size_t d = 0; d < lanes_.size(); ++d) {
      lanes_[d].takes_part = options.script.empty() ? options.shares[d] > 0 : !options.script[d].empty();
    }
    claims_ = make_claims(std::move(options));
  }

  void start_clock() { start_ = Clock::now(); }

  [[nodiscard]] NextWork next(std::size_t device, Clock::time_point now) noexcept override {
    Lane& lane = lanes_[device];
    if (lane.stage == Stage::outside) lane.stage = lane.takes_part && enter() ? Stage::computing : Stage::waiting;
    if (lane.stage == Stage::computing) return next_micro_batch(device, now);
    if (lane.stage == Stage::over) return NextWork::done();
    const int phase = phase_.load(std::memory_order_acquire);
    if (phase == kComputing) return NextWork::wait();
    lane.stage = Stage::over;
    if (phase == kFailed) return NextWork::done();
    if (reduction_ != nullptr) return NextWork::take(kReduce);
    settle_once();
    return NextWork::done();
  }

  void perform(std::size_t device, std::int64_t work, Turn&) override {
    Lane& lane = lanes_[device];
    if (work == kMicroBatch) lane.excluded = program_->run(lane.current);
    if (work == kFinish) program_->finish(device);
    if (work == kReduce && reduction_->work()) settle_once();
  }

  void done(std::size_t device, std::int64_t work, const WorkTiming& timing) noexcept override {
    Lane& lane = lanes_[device];
    if (work == kMicroBatch) {
      lane.current.items = {};  // they end with the step, the record does not
      lane.claims.push_back({lane.current, seconds_at(timing.start), seconds_at(timing.finish), lane.excluded});
      lane.current = MicroBatch{.device_index = device};
    } else if (work == kFinish) {
      leave(device);
    }
  }

  void failed(std::size_t device, std::int64_t /*work*/, std::exception_ptr error) noexcept override {
    fail(std::move(error), lanes_[device].current);
    leave(device);
  }

  void cancel(std::exception_ptr reason) noexcept override { fail(std::move(reason), std::nullopt); }

  [[nodiscard]] bool complete() const noexcept override { return settled_.load(std::memory_order_acquire); }

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
  enum class Stage : std::uint8_t { outside, computing, waiting, over };
  // The kinds of work.
  static constexpr std::int64_t kMicroBatch = 0;
  static constexpr std::int64_t kFinish = 1;
  static constexpr std::int64_t kReduce = 2;

  // A worker writes only its own lane; the barrier publishes it. Padded, so that neighbours do not share a cache line.
  struct alignas(64) Lane {
    std::vector<ClaimRecord> claims;
    MicroBatch current;
    Stage stage = Stage::outside;
    bool takes_part = true;
    bool excluded = false;
    bool asks_again = false;  // when it has done all that it was given
    std::optional<Clock::time_point> waits_since;
  };
  static constexpr std::uint32_t kClosed = std::uint32_t{1} << 31;  // of inside_: nobody enters any more
  static constexpr int kComputing = 0;
  static constexpr int kReducing = 1;
  static constexpr int kFailed = 2;

  [[nodiscard]] double seconds_at(Clock::time_point time) const {
    return std::chrono::duration<double>(time - start_).count();
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

  void fail(std::exception_ptr error, const std::optional<MicroBatch>& micro_batch) noexcept {
    {
      const std::lock_guard lock(failure_mutex_);
      if (decided_) return;  // too late: the results are being written
      if (!failure_) failure_ = StepFailure{std::move(error), micro_batch};
    }
    claims_->cancel();
    wake_all();
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
  void leave(std::size_t device) noexcept {
    lanes_[device].stage = Stage::waiting;
    if (inside_.fetch_sub(1, std::memory_order_acq_rel) != 1 || !claims_->exhausted()) return;
    std::uint32_t nobody = 0;
    if (inside_.compare_exchange_strong(nobody, kClosed, std::memory_order_acq_rel)) open_reduction();
  }

  [[nodiscard]] NextWork next_micro_batch(std::size_t device, Clock::time_point now) noexcept {
    Lane& lane = lanes_[device];
    lane.current = MicroBatch{.device_index = device};
    try {
      for (;;) {
        const Event* const event = lane.asks_again ? program_->idle(device) : program_->slot(device);
        if (event != nullptr && !claims_->cancelled() && !event->done()) return wait_for(lane, *event, now);
        lane.waits_since.reset();
        lane.asks_again = false;
        if (const auto claimed = claims_->claim(device, seconds_at(Clock::now()))) {
          lane.current = *claimed;
          return NextWork::take(kMicroBatch);
        }
        if (!claims_->asks_again(device)) return NextWork::take(kFinish);
        lane.asks_again = true;
      }
    } catch (...) {
      fail(std::current_exception(), lane.current);
      leave(device);
      return NextWork::wait();  // the worker is woken when the last one has left
    }
  }

  [[nodiscard]] NextWork wait_for(Lane& lane, const Event& event, Clock::time_point now) {
    if (!lane.waits_since) lane.waits_since = now;
    const auto patience = internal::bounded(program_->patience());
    if (now - *lane.waits_since > patience) program_->give_up(event);
    return NextWork::wait(&event, *lane.waits_since + patience);
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
    phase_.store(phase, std::memory_order_release);
    wake_all();
    if (phase == kFailed) settle_once();
  }

  void settle_once() noexcept {
    if (over_.exchange(true, std::memory_order_acq_rel)) return;
    reduced_at_ = seconds_at(Clock::now());
    settled_.store(true, std::memory_order_release);
    wake_caller();
  }

  std::shared_ptr<StepProgram> program_;
  std::unique_ptr<BlockReduction> reduction_;
  std::unique_ptr<engine::Claims> claims_;
  std::vector<Lane> lanes_;
  bool asynchronous_;
  bool scripted_;
  Clock::time_point start_{};
  std::atomic<std::uint32_t> inside_{0};  // workers that compute, and kClosed
  std::atomic<int> phase_{kComputing};
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
  source_ = std::make_shared<Source>(group_, std::move(program), std::move(options));
}

Step::~Step() = default;

void Step::start() {
  source_->start_clock();
  group_.submit(source_);
}

bool Step::wait(const DeviceGroup::Between& between) { return group_.wait(*source_, between); }

void Step::cancel() { canceller()(); }

std::function<void()> Step::canceller() const {
  return [source = std::weak_ptr<Source>(source_)] {
    if (const std::shared_ptr<Source> alive = source.lock()) {
      alive->cancel(std::make_exception_ptr(Cancelled("step: cancelled before it was done; nothing was committed.")));
    }
  };
}

const StepFailure* Step::failure() const noexcept { return source_->failure(); }
std::vector<std::int64_t> Step::items() const { return source_->items(); }
bool Step::settled() const { return source_->program().settled(); }
void Step::settle() const { source_->program().settle(); }
StepRecord Step::record() const { return source_->record(); }

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
  const StepFailure* failure = source_->failure();
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
