// SPDX-License-Identifier: Apache-2.0
#include "engine/queues/step_times.hpp"

#include <algorithm>
#include <iterator>
#include <new>

#include <paceline/error.hpp>

#include "comm/space_collectives.hpp"

namespace paceline {

StepTimes::~StepTimes() = default;

}  // namespace paceline

namespace paceline::internal {
namespace {

constexpr std::size_t kBefore = ~std::size_t{0};  // a wait before a run
constexpr int kPatience = 8;                      // steps that better evidence counts for

}  // namespace

void Evidence::classify(std::vector<char>& strict, const std::vector<char>& ran, const std::vector<char>& clean) {
  const std::lock_guard lock(mutex_);
  if (!strict.empty()) return;
  steps_without_.resize(clean.size(), kPatience);
  strict.resize(clean.size());
  for (std::size_t d = 0; d < clean.size(); ++d) {
    int& without = steps_without_[d];
    if (clean[d] != 0) without = 0;
    if (clean[d] == 0 && ran[d] != 0) without = std::min(without + 1, kPatience + 1);
    strict[d] = static_cast<char>(without <= kPatience);
  }
}

std::unique_ptr<Event> SpareEvents::take_end(AsyncDevice& home) {
  const std::lock_guard lock(mutex_);
  if (ends_.empty()) return home.make_event(false);
  std::unique_ptr<Event> end = std::move(ends_.back());
  ends_.pop_back();
  return end;
}

Span SpareEvents::take_span(DeviceId d, AsyncDevice& maker) {
  const std::lock_guard lock(mutex_);
  if (spans_.size() <= d || spans_[d].empty()) return {maker.make_event(true), maker.make_event(true), {}};
  Span span = std::move(spans_[d].back());
  spans_[d].pop_back();
  return span;
}

void SpareEvents::put(std::unique_ptr<Event> end, std::vector<std::vector<Span>> spans) {
  const std::lock_guard lock(mutex_);
  ends_.push_back(std::move(end));
  spans_.resize(std::max(spans_.size(), spans.size()));
  for (std::size_t d = 0; d < spans.size(); ++d) std::ranges::move(spans[d], std::back_inserter(spans_[d]));
}

RecordedTimes::~RecordedTimes() {
  try {
    for (std::size_t d = 0; d < waits_.size(); ++d) {
      for (Wait& wait : waits_[d]) spans_[d].push_back(std::move(wait.span));
    }
    std::ranges::move(arrivals_, std::back_inserter(spans_));
    spare_->put(std::move(over_), std::move(spans_));
  } catch (const std::bad_alloc&) {  // no memory for the lists: the events are destroyed
  }
}

void RecordedTimes::begin_arrival(std::size_t space, AsyncDevice& maker, Stream& stream) {
  if (arrivals_.size() <= space) arrivals_.resize(space + 1);
  arrivals_[space].push_back(spare_->take_span(spans_.size() + space, maker));
  stream.record(*arrivals_[space].back().start);
}

void RecordedTimes::end_arrival(std::size_t space, Stream& stream) { stream.record(*arrivals_[space].front().end); }

void RecordedTimes::note_first_arrival(std::size_t space, AsyncDevice& maker, Stream& stream) {
  if (arrivals_.size() <= space || arrivals_[space].size() != 1) return;
  arrivals_[space].push_back(spare_->take_span(spans_.size() + space, maker));
  stream.record(*arrivals_[space].back().end);
}

double RecordedTimes::arrival_seconds(DeviceId d) const {
  const std::size_t space = space_of_[d];
  if (space >= arrivals_.size() || arrivals_[space].empty()) return 0.0;
  const Span& awaited = needs_all_[d] != 0 ? arrivals_[space].front() : arrivals_[space].back();
  return awaited.end->seconds_since(*arrivals_[space].front().start);
}

double RecordedTimes::waited_seconds(DeviceId d, std::size_t run) const {
  double seconds = 0.0;
  for (const Wait& wait : waits_[d]) {
    if (wait.run == run) seconds += wait.span.end->seconds_since(*wait.span.start);
  }
  return seconds;
}

void RecordedTimes::wait() const {
  if (!ended_.load(std::memory_order_acquire)) {
    throw InvalidArgument("step: it has not come to end_step(), so nobody can wait for its devices. Use drain().");
  }
  if (*hung_ && !over_->done()) throw_late(*over_, timeout_);  // a second wait would take as long again
  try {
    wait_for(*over_, timeout_);
  } catch (const Timeout&) {
    *hung_ = true;
    throw;
  }
  // A collective that was given up lets its stream go on, and that is known by then.
  if (const auto collectives = collectives_.lock()) collectives->check();
}

void RecordedTimes::stamp(std::vector<ClaimRecord>& claims) const {
  const std::size_t device_count = spans_.size();
  std::vector<std::size_t> next(device_count, 0);
  std::vector<double> origin(device_count, 0.0);
  std::vector<char> held_up(claims.size(), 0);
  std::vector<char> ran(device_count, 0);
  std::vector<char> clean(device_count, 0);
  for (std::size_t i = 0; i < claims.size(); ++i) {
    ClaimRecord& claim = claims[i];
    const DeviceId d = claim.micro_batch.device;
    const std::vector<Span>& spans = spans_[d];
    const std::size_t k = next[d]++;
    if (k == 0) claim.arrival_seconds = arrival_seconds(d);
    if (spans.empty()) continue;
    ran[d] = 1;
    if (k == 0) origin[d] = claim.start_seconds + claim.arrival_seconds;
    const double waited = waited_seconds(d, k);
    if (k == 0) claim.arrival_seconds += waited;
    claim.start_seconds = origin[d] + spans[k].start->seconds_since(*spans[0].start) + waited;
    const double seconds = spans[k].end->seconds_since(*spans[k].start) - waited;
    claim.finish_seconds = claim.start_seconds + seconds;
    held_up[i] = static_cast<char>(spans[k].held_up(seconds));
    if (held_up[i] == 0 && !claim.excluded) clean[d] = 1;
  }
  evidence_->classify(strict_, ran, clean);
  for (std::size_t i = 0; i < claims.size(); ++i) {
    if (held_up[i] != 0 && strict_[claims[i].micro_batch.device] != 0) claims[i].excluded = true;
  }
}

bool RecordedTimes::begin_run(DeviceId d, AsyncDevice& maker, Stream& stream, bool continues) {
  std::vector<Span>& spans = spans_[d];
  // A device that had nothing to do when it was given more has waited for the host. That time is no evidence.
  const bool dry = !spans.empty() && spans.back().end->done();
  if (continues) return dry;
  spans.push_back(spare_->take_span(d, maker));
  restart_run(d, stream);
  return dry;
}

void RecordedTimes::begin_wait(DeviceId d, AsyncDevice& maker, Stream& stream) {
  waits_[d].push_back({spans_[d].size() - 1, spare_->take_span(d, maker)});
  stream.record(*waits_[d].back().span.start);
}

void RecordedTimes::restart_run(DeviceId d, Stream& stream) {
  for (Wait& wait : waits_[d]) {
    if (wait.run + 1 == spans_[d].size()) wait.run = kBefore;
  }
  Span& span = spans_[d].back();
  stream.record(*span.start);
  span.opened = std::chrono::steady_clock::now();
}

void RecordedTimes::end_run(DeviceId d, Stream& stream) {
  Span& span = spans_[d].back();
  stream.record(*span.end);
  span.launch_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - span.opened).count();
  span.overtaken = span.start->done();
}

const Event* RecordedTimes::end_of_run(DeviceId d, std::size_t back) const {
  const std::vector<Span>& spans = spans_[d];
  return spans.size() > back ? spans[spans.size() - 1 - back].end.get() : nullptr;
}

}  // namespace paceline::internal
