// SPDX-License-Identifier: Apache-2.0
#include "engine/queues/bucket_sums.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include <paceline/error.hpp>

#include "comm/link.hpp"

namespace paceline::internal {
namespace {

constexpr std::size_t kLoadBytes = 16;  // kernels load so many at a time
// A bucket below this size takes longer to cut than to pull.
constexpr std::size_t kLeastCut = std::size_t{256} << 10;

std::size_t rounded_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

const void* at(const void* data, std::size_t bytes) { return static_cast<const char*>(data) + bytes; }
void* at(void* data, std::size_t bytes) { return static_cast<char*>(data) + bytes; }

}  // namespace

BucketSums::BucketSums(std::vector<SumSpace> spaces, const std::vector<SumSource>& sources, std::size_t chunk_bytes,
                       std::optional<DType> travels, std::optional<std::chrono::nanoseconds> pump)
    : chunk_bytes_(std::max(chunk_bytes, kLoadBytes)) {
  const auto on_gpu = [](const SumSpace& space) { return space.stream != nullptr; };
  if (std::ranges::count_if(spaces, on_gpu) > 1) travels_ = travels;
  for (const SumSpace& space : spaces) {
    spaces_.push_back({space});
    if (!on_gpu(space)) continue;
    spaces_.back().summed = space.maker->make_event(false);
    spaces_.back().rounded = space.maker->make_event(false);
  }
  for (const SumSource& source : sources) sources_.push_back({source});
  for (auto& event : pulled_) event = spaces_[kHome].maker->make_event(false);
  if (!pump.has_value()) return;
  timeout_ = *pump;
  pump_ = std::make_unique<IssuingThread>("pl sums");
}

void BucketSums::use(Stream& home) {
  const std::lock_guard lock(mutex_);
  spaces_[kHome].landing.reset();
  spaces_[kHome].sums[0].reset();
  for (auto& half : spaces_[kHome].halves) half.reset();
  spaces_[kHome].stream = &home;
  for (auto& event : pulled_) home.record(*event);
}

void BucketSums::begin(const std::vector<bool>& takes_part) {
  stop_pump();
  const std::lock_guard lock(mutex_);
  for (std::size_t d = 0; d < sources_.size(); ++d) {
    sources_[d].takes_part = takes_part.empty() || takes_part[d];
    for (Bucket& bucket : sources_[d].buckets) bucket.sealed = false;
  }
  count_ = next_ = 0;
  again_.clear();
  error_ = nullptr;
  cancelled_ = false;
  pump_state_ = Pump::idle;
}

void BucketSums::first(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    if (pump_ != nullptr && !pump_rests_) return start_pump(std::move(work));
  }
  work();
}

void BucketSums::expect(std::span<const BufferView> outputs, double scale) {
  const std::lock_guard lock(mutex_);
  if (outputs_.size() < outputs.size()) {
    outputs_.resize(outputs.size());
    memory_of_outputs_.resize(outputs.size());
  }
  for (count_ = 0; const BufferView& output : outputs) {
    BufferView& known = outputs_[count_];
    if (known.data != output.data) memory_of_outputs_[count_] = spaces_[kHome].stream->place_of(output.data);
    known = output;
    ++count_;
  }
  scale_ = scale;
  again_.assign(outputs.size(), false);
}

void BucketSums::seal(std::size_t index, std::size_t k, const BufferView& bucket, NativeEvent written) {
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);  // kept for others: it came first
  Source& source = sources_[index];
  if (source.buckets.size() <= k) source.buckets.resize(k + 1);
  Bucket& here = source.buckets[k];
  if (here.data != bucket.data) here.memory = spaces_[kHome].stream->place_of(bucket.data);
  here.data = bucket.data;
  if (source.stream != nullptr) {
    if (written != nullptr) {
      here.written = source.device->adopt_event(written);
    } else {
      if (here.own == nullptr) here.own = source.device->make_event(false);
      source.stream->record(*here.own);
      here.written = here.own;
    }
  }
  here.sealed = true;
  if (k < next_) again_[k] = true;
  if (pump_ == nullptr || pump_rests_) {
    while (is_due()) take_and_sum(next_++);
  } else if (pump_state_ == Pump::idle && is_due()) {
    start_pump({});
  }
}

void BucketSums::finish() {
  stop_pump();
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  while (next_ < count_) take_and_sum(next_++);
  for (std::size_t k = 0; k < again_.size(); ++k) {
    if (again_[k]) take_and_sum(k);
  }
  pump_rests_ = false;
}

void BucketSums::cancel() {
  if (pump_ == nullptr) return;
  cancelled_ = true;  // without the lock, which a fork may have left held
  settle({}, IssuingThread::Interrupt::yes);
}

void BucketSums::settle(std::optional<std::chrono::nanoseconds> timeout, IssuingThread::Interrupt interrupt) {
  if (pump_ == nullptr || pump_->wait(timeout.value_or(timeout_), interrupt)) return;
  const std::string device = spaces_[at_].summed->device();
  throw Timeout(
      fmt::format(
          "{}: CUDA did not come back within {:g} s from a call for parameters or for the sum of gradients. The "
          "thread that made it was left behind. Start a new process.",
          device, std::chrono::duration<double>(timeout_).count()),
      device);
}

void BucketSums::close(std::chrono::nanoseconds timeout) {
  if (pump_ != nullptr) static_cast<void>(pump_->close(timeout));
}

/// Requires the lock.
void BucketSums::start_pump(std::function<void()> first) {
  pump_state_ = Pump::runs;
  pump_->start([this, first = std::move(first), owner = owner_.lock()] { pump(first); });
}

/// On its thread: does what comes first, then enqueues the sums that are due.
void BucketSums::pump(const std::function<void()>& first) {
  std::unique_lock lock(mutex_, std::defer_lock);
  const auto stop = [&] {
    if (!lock.owns_lock()) lock.lock();
    error_ = std::current_exception();
    pump_state_ = Pump::stopped;
  };
  try {
    if (first != nullptr) first();
    lock.lock();
    while (pump_state_ == Pump::runs && is_due()) {
      const std::size_t k = next_++;
      take(k);
      lock.unlock();
      sum(k);
      lock.lock();
    }
    if (pump_state_ == Pump::runs) pump_state_ = Pump::idle;
  } catch (const OutOfMemory&) {
    stop();
    pump_rests_ = true;
  } catch (...) {
    stop();
  }
}

void BucketSums::stop_pump() {
  if (pump_ == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    pump_state_ = Pump::stopped;
  }
  settle();
}

void BucketSums::check(std::size_t space) {
  at_ = space;
  if (cancelled_ || (pump_ != nullptr && pump_->given_up())) throw Cancelled("the work of this step was given up");
}

Stream& BucketSums::on(std::size_t space) {
  check(space);
  return *spaces_[space].stream;
}

bool BucketSums::has(const Source& source, std::size_t k) {
  return k < source.buckets.size() && source.buckets[k].sealed;
}

bool BucketSums::is_due() const {
  return next_ < count_ &&
         std::ranges::all_of(sources_, [&](const Source& source) { return !source.takes_part || has(source, next_); });
}

void BucketSums::take(std::size_t k) {
  parts_.clear();
  for (const Source& source : sources_) {
    if (has(source, k)) parts_.push_back({.bucket = source.buckets[k], .space = source.space});
  }
}

void BucketSums::take_and_sum(std::size_t k) {
  take(k);
  sum(k);
}

/// The spaces that sum a slice of the bucket each.
std::vector<std::size_t> BucketSums::owners(std::size_t k) const {
  std::set<std::size_t> in_use{kHome};
  for (const Part& part : parts_) in_use.insert(part.space);
  std::vector<std::size_t> found{kHome};
  if (in_use.size() <= 2 || outputs_[k].count * size_of(outputs_[k].dtype) < kLeastCut) return found;
  for (const std::size_t s : in_use) {
    if (s != kHome && spaces_[s].stream != nullptr) found.push_back(s);
  }
  if (found.size() > 2) found.erase(found.begin());
  return found;
}

void BucketSums::sum(std::size_t k) {
  const BufferView& output = outputs_[k];
  const std::vector<std::size_t> shares = owners(k);
  for (const std::size_t s : shares) {
    if (rounds(output.dtype)) break;  // round() waits
    for (const Part& part : parts_) {
      if (part.bucket.written != nullptr) on(s).wait(*part.bucket.written);
    }
  }
  const std::size_t chunk = chunk_bytes_ / kLoadBytes * kLoadBytes / size_of(output.dtype);
  for (std::size_t begin = 0; begin < output.count; begin += chunk) {
    sum_chunk(k, shares, begin, std::min(begin + chunk, output.count));
  }
}

void BucketSums::sum_chunk(std::size_t k, std::span<const std::size_t> owners, std::size_t begin, std::size_t end) {
  const BufferView& output = outputs_[k];
  const bool rounding = rounds(output.dtype);
  const DType dtype = rounding ? *travels_ : output.dtype;
  const std::size_t size = size_of(dtype), count = end - begin;
  Space& home = spaces_[kHome];
  void* const result = at(output.data, begin * size_of(output.dtype));
  void* total = result;
  if (rounding) {
    round(owners, begin, count);
    total = reserve(home.sums[0], count * size, *home.maker, on(kHome));
  } else {
    for (Part& part : parts_) {
      part.chunk = at(part.bucket.data, begin * size);
      part.memory = part.bucket.memory;
      part.place = part.space;
    }
  }
  const std::size_t length = rounded_up((count + owners.size() - 1) / owners.size(), kLoadBytes);
  std::vector<Slice> elsewhere;
  std::size_t next = 0;
  for (const std::size_t s : owners) {
    Slice slice{.space = s, .begin = next, .end = std::min(next + length, count)};
    next = slice.end;
    if (slice.begin == slice.end) break;
    if (s == kHome) {
      slice.sum = at(total, slice.begin * size);
      sum_slice(slice, dtype);
      continue;
    }
    Space& space = spaces_[s];
    if (!rounding) on(s).wait(*pulled_[parity_]);  // otherwise round() has waited
    slice.sum = reserve(space.sums[parity_], length * size, *space.maker, on(s));
    sum_slice(slice, dtype);
    on(s).record(*space.summed);
    elsewhere.push_back(slice);
  }
  for (const Slice& slice : elsewhere) {
    on(kHome).wait(*spaces_[slice.space].summed);
    on(kHome).copy(at(total, slice.begin * size), rounding ? home.maker->place() : memory_of_outputs_[k], slice.sum,
                   spaces_[slice.space].maker->place(), (slice.end - slice.begin) * size);
  }
  if (rounding) on(kHome).convert(result, output.dtype, total, dtype, count);
  if (elsewhere.empty() && !rounding) return;
  on(kHome).record(*pulled_[parity_]);
  parity_ = 1 - parity_;
}

void BucketSums::round(std::span<const std::size_t> owners, std::size_t begin, std::size_t count) {
  const std::size_t wide = count * sizeof(float);
  const std::size_t each = rounded_up(count * size_of(*travels_), kLoadBytes);
  std::vector<std::size_t> givers;
  for (std::size_t s = 0; s < spaces_.size(); ++s) {
    const auto gives = [&](const Part& part) {
      return (spaces_[part.space].stream == nullptr ? kHome : part.space) == s;
    };
    const auto parts = static_cast<std::size_t>(std::ranges::count_if(parts_, gives));
    if (parts == 0) continue;
    givers.push_back(s);
    Space& space = spaces_[s];
    if (s != kHome) on(s).wait(*pulled_[parity_]);
    void* half = reserve(space.halves[parity_], parts * each, *space.maker, on(s));
    for (Part& part : parts_) {
      if (!gives(part)) continue;
      const void* from = at(part.bucket.data, begin * sizeof(float));
      if (part.space != s) {  // the host's
        void* const landing = reserve(space.landing, wide, *space.maker, on(s));
        on(s).copy(landing, space.maker->place(), from, part.bucket.memory, wide);
        from = landing;
      } else if (part.bucket.written != nullptr) {
        on(s).wait(*part.bucket.written);
      }
      on(s).convert(half, *travels_, from, DType::float32, count);
      part.chunk = half;
      part.memory = space.maker->place();
      part.place = s;
      half = at(half, each);
    }
    on(s).record(*space.rounded);
  }
  for (const std::size_t owner : owners) {
    for (const std::size_t giver : givers) {
      if (giver != owner) on(owner).wait(*spaces_[giver].rounded);
    }
  }
}

void BucketSums::sum_slice(const Slice& slice, DType dtype) {
  Space& space = spaces_[slice.space];
  const std::size_t offset = slice.begin * size_of(dtype), bytes = (slice.end - slice.begin) * size_of(dtype);
  const auto comes = [&](const Part& part) { return part.place != slice.space; };
  char* landed = nullptr;
  if (const auto count = static_cast<std::size_t>(std::ranges::count_if(parts_, comes)); count > 0) {
    // The kernel loads 16 bytes at a time if all its buffers have the same alignment.
    const std::size_t shift = reinterpret_cast<std::uintptr_t>(slice.sum) % kLoadBytes;
    const std::size_t room = count * rounded_up(bytes, kLoadBytes) + shift;
    landed = static_cast<char*>(reserve(space.landing, room, *space.maker, on(slice.space))) + shift;
  }
  // Each space pulls from the next one first. If all began with the same one, they would share its port.
  struct Pull {
    std::size_t distance;
    void* to;
    const void* from;
    MemoryPlace memory;
  };
  std::vector<const void*> inputs;
  std::vector<Pull> pulls;
  for (const Part& part : parts_) {
    const void* const data = at(part.chunk, offset);
    inputs.push_back(comes(part) ? landed : data);
    if (!comes(part)) continue;
    pulls.push_back({(part.place + spaces_.size() - slice.space) % spaces_.size(), landed, data, part.memory});
    landed += rounded_up(bytes, kLoadBytes);
  }
  std::ranges::stable_sort(pulls, {}, &Pull::distance);
  for (const Pull& pull : pulls) {
    on(slice.space).copy(pull.to, space.maker->place(), pull.from, pull.memory, bytes);
  }
  if (!inputs.empty()) on(slice.space).reduce({inputs, slice.sum, bytes / size_of(dtype), dtype, scale_});
}

}  // namespace paceline::internal
