// SPDX-License-Identifier: Apache-2.0
#include "engine/step/step_source.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include <paceline/error.hpp>

#include "runtime/deadline.hpp"

namespace paceline::internal {
namespace {

// The kinds of work.
constexpr std::int64_t kMicroBatch = 0;
constexpr std::int64_t kFinish = 1;
constexpr std::int64_t kReduce = 2;

// The phases of a step.
constexpr int kComputing = 0;
constexpr int kReducing = 1;
constexpr int kFailed = 2;

// A claim between whose pieces the worker of an asynchronous device was away for longer says nothing of its speed.
constexpr double kLeastBetween = 50e-6;  // seconds; less than that, a claim of microseconds would be no evidence
constexpr double kMostBetween = 0.05;

constexpr std::uint32_t kClosed = std::uint32_t{1} << 31;  // of inside_: nobody enters any more

}  // namespace

StepSource::StepSource(const DeviceGroup& group, std::shared_ptr<StepProgram> program, StepOptions options)
    : program_(std::move(program)),
      pieces_(options.pieces),
      devices_(group.ids()),
      asynchronous_(group.asynchronous()),
      scripted_(!options.script.empty()),
      phase_(kComputing) {
  for (std::size_t place = 0; auto& [id, state] : devices_) {
    state.takes_part = options.script.empty() ? options.shares[place] > 0 : !options.script[place].empty();
    state.place = place++;
  }
  queue_ = WorkQueue::of(std::move(options));
}

NextWork StepSource::next(DeviceId device, Clock::time_point now) noexcept {
  DeviceState& state = devices_[device];
  if (state.stage == Stage::outside) {
    state.stage = state.takes_part && enter() ? Stage::computing : Stage::waiting;
    if (state.stage == Stage::computing) state.lent = lent_time_of_this_thread();
  }
  if (state.stage == Stage::computing) return next_micro_batch(state, device, now);
  if (state.stage == Stage::over) return NextWork::done();
  const int phase = phase_.load(std::memory_order_acquire);
  if (phase == kComputing) return NextWork::wait();
  state.stage = Stage::over;
  if (phase == kFailed) return NextWork::done();
  if (reduction_ != nullptr) return NextWork::take(kReduce);
  settle_once();
  return NextWork::done();
}

void StepSource::perform(DeviceId device, std::int64_t work, Turn&) {
  DeviceState& state = devices_[device];
  if (work == kMicroBatch) {
    state.claim->excluded |= program_->run(state.current);
    pieces_->measure(state.current, *program_);
  }
  if (work == kFinish) program_->finish(device);
  if (work == kReduce && reduction_->work()) settle_once();
}

void StepSource::done(DeviceId device, std::int64_t work, const WorkTiming& timing) noexcept {
  DeviceState& state = devices_[device];
  if (work == kMicroBatch) {
    const double seconds = std::chrono::duration<double>(timing.finish - timing.start).count();
    pieces_->ran(state.current, seconds, !state.claim->excluded);
    if (state.current.continues) {
      state.between += timing.start - state.ended;
    } else {
      state.claim->start_seconds = seconds_at(timing.start);
    }
    state.claim->finish_seconds = seconds_at(timing.finish);
    state.ended = timing.finish;
    state.current = MicroBatch{.device = device};
  } else if (work == kFinish) {
    leave(device);
  }
}

void StepSource::failed(DeviceId device, std::int64_t /*work*/, std::exception_ptr error) noexcept {
  fail(std::move(error), devices_[device].current);
  leave(device);
}

void StepSource::cancel(std::exception_ptr reason) noexcept { fail(std::move(reason), std::nullopt); }

StepRecord StepSource::record() const {
  StepRecord record;
  double first = reduced_at_;
  double last = 0.0;
  for (const auto& [id, state] : devices_)
    record.claims.insert(record.claims.end(), state.claims.begin(), state.claims.end());
  // The host saw when they ended. What stamp() takes out of them, such as waits, is no part of the reduction.
  if (!asynchronous_) {
    for (const ClaimRecord& claim : record.claims) last = std::max(last, claim.finish_seconds);
  }
  program_->stamp(record.claims);
  for (const ClaimRecord& claim : record.claims) {
    first = std::min(first, claim.start_seconds);
    last = std::max(last, claim.finish_seconds);
  }
  record.compute_seconds = std::max(0.0, last - first);
  if (!asynchronous_) {
    record.reduce_seconds = std::max(0.0, reduced_at_ - last);
    record.lent_parts = lent_parts(record.claims);
  }
  if (!scripted_) {
    record.startup_seconds = asynchronous_ ? arrivals(record.claims) : startups(first, record.compute_seconds);
  }
  // Asynchronous devices may still work when the host is done.
  record.step_seconds = std::max(reduced_at_, record.compute_seconds);
  return record;
}

std::vector<bool> StepSource::takes_part() const {
  std::vector<bool> takes_part;
  for (const auto& [id, state] : devices_) takes_part.push_back(state.takes_part);
  return takes_part;
}

std::vector<std::int64_t> StepSource::items() const {
  std::vector<std::int64_t> items;
  for (const auto& [id, state] : devices_) {
    items.push_back(0);
    for (const ClaimRecord& claim : state.claims) items.back() += claim.micro_batch.size();
  }
  return items;
}

NextWork StepSource::next_micro_batch(DeviceState& state, DeviceId device, Clock::time_point now) noexcept {
  state.current = MicroBatch{.device = device};
  try {
    if (state.claim && next_piece(state, device)) {
      if (queue_->cancelled()) throw Cancelled("the step was cancelled");
      return NextWork::take(kMicroBatch);
    }
    for (;;) {
      const Event* const event = state.asks_again ? program_->idle(device) : program_->slot(device);
      if (event != nullptr && !queue_->cancelled() && !event->done()) return wait_for(state, *event, now);
      state.waits_since.reset();
      state.asks_again = false;
      if (auto claimed = queue_->claim(state.place, seconds_at(Clock::now()))) {
        claimed->device = device;
        state.claim = ClaimRecord{.micro_batch = *claimed, .excluded = pieces_->on_trial()};
        state.claim->micro_batch.items = {};  // they end with the step, the record does not
        state.between = {};
        pieces_->begin(*claimed);
        if (next_piece(state, device)) return NextWork::take(kMicroBatch);
      }
      if (!queue_->asks_again(state.place)) return NextWork::take(kFinish);
      state.asks_again = true;
    }
  } catch (...) {
    fail(std::current_exception(), state.current);
    leave(device);
    return NextWork::wait();  // the worker is woken when the last one has left
  }
}

/// The next piece of the claim that the device runs. When there is none, the claim is over.
bool StepSource::next_piece(DeviceState& state, DeviceId device) {
  if (const std::optional<MicroBatch> piece = pieces_->next(device)) {
    state.current = *piece;
    return true;
  }
  // Between two pieces the worker may have done other work, which is not the claim's.
  const double between = std::chrono::duration<double>(state.between).count();
  if (asynchronous_) {
    state.claim->excluded |= between > std::max(kLeastBetween, kMostBetween * (state.claim->seconds() - between));
  } else {
    state.claim->lent_seconds = between;
  }
  state.claims.push_back(*std::exchange(state.claim, std::nullopt));
  return false;
}

NextWork StepSource::wait_for(DeviceState& state, const Event& event, Clock::time_point now) {
  if (!state.waits_since) state.waits_since = now;
  const auto patience = internal::bounded(program_->patience());
  if (now - *state.waits_since >= patience) {
    program_->give_up(event);
    throw_late(event, patience);  // a wait that ends in the past would make the worker ask all the time
  }
  return NextWork::wait(&event, *state.waits_since + patience);
}

/// Returns false if all is done or others run the rest. So a worker that the system wakes late delays nobody.
bool StepSource::enter() noexcept {
  std::uint32_t inside = inside_.load(std::memory_order_relaxed);
  do {
    if ((inside & kClosed) != 0) return false;
  } while (!inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel));
  return true;
}

/// The worker that leaves last, when nothing is left to claim, opens the reduction. If something is left, a worker that
/// has not entered yet takes it.
void StepSource::leave(DeviceId device) noexcept {
  DeviceState& state = devices_[device];
  state.stage = Stage::waiting;
  // Less than before: another thread is the device's worker now.
  const LentTime& now = lent_time_of_this_thread();
  state.lent = {.seconds = std::max(0.0, now.seconds - state.lent.seconds), .most = now.most};
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) != 1 || !queue_->exhausted()) return;
  std::uint32_t nobody = 0;
  if (inside_.compare_exchange_strong(nobody, kClosed, std::memory_order_acq_rel)) open_reduction();
}

void StepSource::open_reduction() noexcept {
  if (!queue_->cancelled()) {  // a failure cancels it
    try {
      std::vector<ReductionSegment> segments = program_->reduction();
      if (!segments.empty()) reduction_ = std::make_unique<internal::BlockReduction>(std::move(segments));
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

void StepSource::settle_once() noexcept {
  if (over_.exchange(true, std::memory_order_acq_rel)) return;
  reduced_at_ = seconds_at(Clock::now());
  settled_.store(true, std::memory_order_release);
  wake_caller();
}

void StepSource::fail(std::exception_ptr error, const std::optional<MicroBatch>& micro_batch) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (decided_) return;  // too late: the results are being written
    if (!failure_) failure_ = StepFailure{std::move(error), micro_batch};
  }
  queue_->cancel();
  // Behind other steps nobody may come for long. Who waits for this one is not made to wait for them.
  std::uint32_t nobody = 0;
  if (inside_.compare_exchange_strong(nobody, kClosed, std::memory_order_acq_rel)) return open_reduction();
  wake_all();
}

double StepSource::seconds_at(Clock::time_point time) const {
  return std::chrono::duration<double>(time - start_).count();
}

std::vector<std::optional<double>> StepSource::startups(double first, double compute_seconds) const {
  std::vector<std::optional<double>> seconds;
  for (const auto& [id, state] : devices_) {
    if (!state.claims.empty()) {
      seconds.emplace_back(state.claims.front().start_seconds - first);
    } else {
      seconds.push_back(state.takes_part ? std::optional(compute_seconds) : std::nullopt);
    }
  }
  return seconds;
}

/// No more than the sources of other work may take, in the long run: a step in which a long job ran says nothing of the
/// next one.
std::vector<double> StepSource::lent_parts(const std::vector<ClaimRecord>& claims) const {
  if (std::ranges::none_of(devices_, [](const auto& one) { return one.value.lent.seconds > 0.0; })) return {};
  PerDevice<double> own(devices_.ids());
  for (const ClaimRecord& claim : claims) own[claim.micro_batch.device] += claim.seconds();
  std::vector<double> parts;
  for (const auto& [id, state] : devices_) {
    const double lent = state.lent.seconds;
    parts.push_back(lent > 0.0 ? std::min(lent / (lent + std::max(0.0, own[id])), state.lent.most) : 0.0);
  }
  return parts;
}

/// By how much later than the first device each device had its parameters. The times at which workers claimed say
/// nothing of when asynchronous devices began.
std::vector<std::optional<double>> StepSource::arrivals(const std::vector<ClaimRecord>& claims) const {
  std::vector<std::optional<double>> seconds(devices_.size());  // in their order
  double first = std::numeric_limits<double>::max();
  for (auto claim = claims.rbegin(); claim != claims.rend(); ++claim) {
    seconds[devices_.place(claim->micro_batch.device)] = claim->arrival_seconds;
  }
  for (const auto& each : seconds) first = std::min(first, each.value_or(first));
  for (auto& each : seconds) {
    if (each) *each -= first;
  }
  return seconds;
}

}  // namespace paceline::internal
