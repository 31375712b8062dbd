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

void Evidence::classify(PerDevice<char>& strict, const PerDevice<char>& ran, const PerDevice<char>& clean) {
  const std::lock_guard lock(mutex_);
  if (strict.size() > 0) return;
  for (const auto& [id, is_clean] : clean) {
    if (steps_without_.find(id) == nullptr) steps_without_.add(id, kPatience);
    int& without = steps_without_[id];
    if (is_clean != 0) without = 0;
    if (is_clean == 0 && ran[id] != 0) without = std::min(without + 1, kPatience + 1);
    strict.add(id, static_cast<char>(without <= kPatience));
  }
}

std::unique_ptr<Event> SpareEvents::take_end(AsyncDevice& home) {
  const std::lock_guard lock(mutex_);
  if (ends_.empty()) return home.make_event(false);
  std::unique_ptr<Event> end = std::move(ends_.back());
  ends_.pop_back();
  return end;
}

Span SpareEvents::take_span(AsyncDevice& maker) {
  const std::lock_guard lock(mutex_);
  std::vector<Span>& spans = spans_[&maker];
  if (spans.empty()) return {&maker, maker.make_event(true), maker.make_event(true)};
  Span span = std::move(spans.back());
  spans.pop_back();
  return span;
}

void SpareEvents::put(std::unique_ptr<Event> end, std::span<std::vector<Span>* const> spans) {
  const std::lock_guard lock(mutex_);
  ends_.push_back(std::move(end));
  for (std::vector<Span>* const list : spans) {
    for (Span& span : *list) spans_[span.maker].push_back(std::move(span));
  }
}

RecordedTimes::~RecordedTimes() {
  try {
    std::vector<std::vector<Span>*> all;
    for (auto& [id, device] : devices_) {
      for (Wait& wait : device.waits) device.spans.push_back(std::move(wait.span));
      all.push_back(&device.spans);
    }
    for (std::vector<Span>& spans : arrivals_) all.push_back(&spans);
    spare_->put(std::move(over_), all);
  } catch (const std::bad_alloc&) {  // no memory for the lists: the events are destroyed
  }
}

void RecordedTimes::begin_arrival(std::size_t space, AsyncDevice& maker, Stream& stream) {
  if (arrivals_.size() <= space) arrivals_.resize(space + 1);
  arrivals_[space].push_back(spare_->take_span(maker));
  stream.record(*arrivals_[space].back().start);
}

void RecordedTimes::end_arrival(std::size_t space, Stream& stream) { stream.record(*arrivals_[space].front().end); }

void RecordedTimes::note_first_arrival(std::size_t space, AsyncDevice& maker, Stream& stream) {
  if (arrivals_.size() <= space || arrivals_[space].size() != 1) return;
  arrivals_[space].push_back(spare_->take_span(maker));
  stream.record(*arrivals_[space].back().end);
}

double RecordedTimes::arrival_seconds(const DeviceTimes& device) const {
  const std::size_t space = device.space;
  if (space >= arrivals_.size() || arrivals_[space].empty()) return 0.0;
  const Span& awaited = device.needs_all ? arrivals_[space].front() : arrivals_[space].back();
  return awaited.end->seconds_since(*arrivals_[space].front().start);
}

double RecordedTimes::waited_seconds(const DeviceTimes& device, std::size_t run) {
  double seconds = 0.0;
  for (const Wait& wait : device.waits) {
    if (wait.run == run) seconds += wait.span.end->seconds_since(*wait.span.start);
  }
  return seconds;
}

void RecordedTimes::wait() const {
  if (!ended_.load(std::memory_order_acquire)) {
    throw InvalidArgument("step: it has not come to end_step(), so nobody can wait for its devices. Use drain().");
  }
  hung_.await(*over_, timeout_);
  // A collective that was given up lets its stream go on, and that is known by then.
  if (const auto collectives = collectives_.lock()) collectives->check();
}

void RecordedTimes::stamp(std::vector<ClaimRecord>& claims) const {
  const std::vector<DeviceId> ids = devices_.ids();
  PerDevice<std::size_t> next(ids);
  PerDevice<double> origin(ids);
  std::vector<char> held_up(claims.size(), 0);
  PerDevice<char> ran(ids);
  PerDevice<char> clean(ids);
  for (std::size_t i = 0; i < claims.size(); ++i) {
    ClaimRecord& claim = claims[i];
    const DeviceId d = claim.micro_batch.device;
    const DeviceTimes& device = devices_[d];
    const std::vector<Span>& spans = device.spans;
    const std::size_t k = next[d]++;
    if (k == 0) claim.arrival_seconds = arrival_seconds(device);
    if (spans.empty()) continue;
    ran[d] = 1;
    if (k == 0) origin[d] = claim.start_seconds + claim.arrival_seconds;
    const double waited = waited_seconds(device, k);
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
  std::vector<Span>& spans = devices_[d].spans;
  // A device that had nothing to do when it was given more has waited for the host. That time is no evidence.
  const bool dry = !spans.empty() && spans.back().end->done();
  if (continues) return dry;
  spans.push_back(spare_->take_span(maker));
  restart_run(d, stream);
  return dry;
}

void RecordedTimes::begin_wait(DeviceId d, AsyncDevice& maker, Stream& stream) {
  DeviceTimes& device = devices_[d];
  device.waits.push_back({device.spans.size() - 1, spare_->take_span(maker)});
  stream.record(*device.waits.back().span.start);
}

void RecordedTimes::restart_run(DeviceId d, Stream& stream) {
  DeviceTimes& device = devices_[d];
  for (Wait& wait : device.waits) {
    if (wait.run + 1 == device.spans.size()) wait.run = kBefore;
  }
  Span& span = device.spans.back();
  stream.record(*span.start);
  span.opened = std::chrono::steady_clock::now();
}

void RecordedTimes::end_run(DeviceId d, Stream& stream) {
  Span& span = devices_[d].spans.back();
  stream.record(*span.end);
  span.launch_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - span.opened).count();
  span.overtaken = span.start->done();
}

const Event* RecordedTimes::end_of_run(DeviceId d, std::size_t back) const {
  const std::vector<Span>& spans = devices_[d].spans;
  return spans.size() > back ? spans[spans.size() - 1 - back].end.get() : nullptr;
}

}  // namespace paceline::internal
