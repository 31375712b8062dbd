// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>

#include "engine/data_parallel/trainer_memory.hpp"

namespace paceline {
namespace {

/// The sums of one device, in its memory; pinned memory for a host device.
struct Sums {
  std::unique_ptr<Buffer> gradients;
  std::unique_ptr<Buffer> loss;
  bool warm = false;
};

template <class T>
T* as(const std::unique_ptr<Buffer>& buffer) {
  return static_cast<T*>(buffer->data());
}

/// The objective of one step, which the devices may still be computing. It may outlive the trainer. Any thread.
class Outcome {
 public:
  /// `loss`: pinned memory that the devices write the step's loss to. read() sets `failure_was_read` if it finds a
  /// failure.
  Outcome(std::shared_ptr<const StepTimes> times, std::shared_ptr<Buffer> loss,
          std::shared_ptr<std::atomic<bool>> failure_was_read)
      : times_(std::move(times)), loss_(std::move(loss)), failure_was_read_(std::move(failure_was_read)) {}

  /// The objective is the loss divided by `divisor`, plus `known`. Call it before anybody reads the objective.
  void set(double divisor, double known) {
    divisor_ = divisor;
    known_ = known;
  }
  [[nodiscard]] void* loss() const { return loss_->data(); }

  [[nodiscard]] double read() {
    const std::lock_guard lock(mutex_);
    return read_locked();
  }
  void fail(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    if (!value_ && failure_ == nullptr) failure_ = error;
  }
  /// Reads the number and lets go of the memory. Requires: the devices are done.
  void settle() {
    const std::lock_guard lock(mutex_);
    try {
      static_cast<void>(read_locked());
    } catch (...) {
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
    loss_.reset();
    times_.reset();
  }

 private:
  double read_locked() {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (value_) return *value_;
    try {
      times_->wait();
    } catch (const Error&) {
      failure_ = std::current_exception();
      failure_was_read_->store(true);
      throw;
    }
    value_ = *static_cast<const double*>(loss_->data()) / divisor_ + known_;
    return *value_;
  }

  std::shared_ptr<const StepTimes> times_;
  std::shared_ptr<Buffer> loss_;
  double divisor_ = 1.0;
  double known_ = 0.0;
  std::shared_ptr<std::atomic<bool>> failure_was_read_;
  std::mutex mutex_;
  std::optional<double> value_;
  std::exception_ptr failure_;
};

/// The memory of a trainer on devices that work after the call. DeviceQueues decides who waits for whom.
template <class T>
class AsyncMemory final : public TrainerMemory<T>, public std::enable_shared_from_this<AsyncMemory<T>> {
 public:
  using Body = typename TrainerMemory<T>::Body;

  AsyncMemory(const DeviceGroup& group, const DataParallelOptions& options)
      : count_(options.parameter_count),
        queues_(group, {.stream = options.stream,
                        .run_ahead = options.run_ahead,
                        .timeout = options.timeout,
                        .collectives = options.collectives}),
        sums_(group.size()) {
    Stream& stream = queues_.home_stream();
    parameters_ = queues_.allocate(queues_.home_space(), bytes(), &stream);
    mean_ = home().allocate(bytes(), stream);
    if (!alone()) loss_ = home().allocate(sizeof(double), stream);
    losses_.push_back(home().allocate_pinned(sizeof(double)));
    stream.zero(parameters_->data(), bytes());
    stream.zero(mean_->data(), bytes());
    for (std::size_t d = 0; d < sums_.size(); ++d) {
      sums_[d].gradients = allocate(queues_.space_of(d), queues_.stream(d), bytes());
      sums_[d].loss = allocate(queues_.space_of(d), queues_.stream(d), sizeof(double));
    }
    foreign_.resize(queues_.space_count());
    for (std::size_t s = 0; s < foreign_.size(); ++s) {
      if (s == queues_.home_space()) continue;
      foreign_[s] = queues_.allocate(s, bytes(), queues_.copy_stream(s));
      copies_.push_back({s, foreign_[s]->data(), parameters_->data(), bytes()});
    }
  }

  ~AsyncMemory() override {
    try {
      queues_.drain();
    } catch (...) {  // interrupted; releasing pinned memory waits in any case
    }
    for (const std::weak_ptr<Outcome>& outcome : outcomes_) {
      if (const auto unread = outcome.lock()) unread->settle();
    }
    // Pinned memory first, while nothing runs: its release waits for all running work, even for the release of the
    // rest.
    losses_.clear();
    for (std::size_t d = 0; d < sums_.size(); ++d) {
      if (queues_.on_host(queues_.space_of(d))) sums_[d] = {};
    }
    for (std::size_t s = 0; s < foreign_.size(); ++s) {
      if (queues_.on_host(s)) foreign_[s].reset();
    }
  }

  [[nodiscard]] std::shared_ptr<TrainerStep> make_step(const Body& body, double total_weight) override;
  [[nodiscard]] std::span<T> parameters() noexcept override { return {as<T>(parameters_), count_}; }
  [[nodiscard]] std::span<T> gradients() noexcept override { return {as<T>(mean_), count_}; }
  [[nodiscard]] void* stream() const noexcept override { return queues_.home_stream().native(); }
  [[nodiscard]] std::string transport() const override { return queues_.transport(); }
  [[nodiscard]] bool failure_was_read() override { return failure_was_read_->exchange(false); }

  void settle_objectives() override {
    for (const std::weak_ptr<Outcome>& outcome : std::exchange(outcomes_, {})) {
      if (const auto unread = outcome.lock()) unread->settle();
    }
  }

  void fail_objectives(const std::exception_ptr& error) override {
    for (const std::weak_ptr<Outcome>& outcome : std::exchange(outcomes_, {})) {
      if (const auto unread = outcome.lock()) unread->fail(error);
    }
  }

  [[nodiscard]] DeviceQueues& queues() noexcept { return queues_; }
  [[nodiscard]] std::vector<Sums>& sums() noexcept { return sums_; }
  [[nodiscard]] std::span<const SpaceCopy> copies() const noexcept { return copies_; }
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }
  /// Whether there is only one device, so that there is nothing to add up.
  [[nodiscard]] bool alone() const noexcept { return sums_.size() == 1; }
  /// The parameters of that memory space.
  [[nodiscard]] std::span<const T> parameters_in(std::size_t space) const noexcept {
    return {as<T>(space == queues_.home_space() ? parameters_ : foreign_[space]), count_};
  }
  /// The memory for the sum of all devices' losses, if there are several devices.
  [[nodiscard]] void* loss() const noexcept { return loss_->data(); }

  [[nodiscard]] std::shared_ptr<Outcome> new_outcome(std::shared_ptr<const StepTimes> times) {
    auto outcome = std::make_shared<Outcome>(std::move(times), take_loss(), failure_was_read_);
    std::erase_if(outcomes_, [](const std::weak_ptr<Outcome>& one) { return one.expired(); });
    outcomes_.push_back(outcome);
    return outcome;
  }

 private:
  /// Pinned memory for a step's loss. No objective refers to it. An earlier step may still write to it, and its write
  /// comes before this step's, since both are on the home stream.
  [[nodiscard]] std::shared_ptr<Buffer> take_loss() {
    for (const std::shared_ptr<Buffer>& loss : losses_) {
      if (loss.use_count() == 1) return loss;
    }
    return losses_.emplace_back(home().allocate_pinned(sizeof(double)));
  }

  [[nodiscard]] AsyncDevice& home() const { return queues_.maker(queues_.home_space()); }

  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::size_t space, Stream* stream, std::size_t size) const {
    AsyncDevice& maker = queues_.maker(space);
    return queues_.on_host(space) ? maker.allocate_pinned(size) : maker.allocate(size, *stream);
  }

  std::size_t count_;
  DeviceQueues queues_;
  std::vector<Sums> sums_;                        // each entry is its worker's
  std::vector<std::unique_ptr<Buffer>> foreign_;  // the parameters of spaces that are not home
  std::vector<SpaceCopy> copies_;
  std::unique_ptr<Buffer> parameters_;
  std::unique_ptr<Buffer> mean_;
  std::unique_ptr<Buffer> loss_;  // null for one device
  std::vector<std::shared_ptr<Buffer>> losses_;
  std::shared_ptr<std::atomic<bool>> failure_was_read_ = std::make_shared<std::atomic<bool>>(false);
  std::vector<std::weak_ptr<Outcome>> outcomes_;
};

template <class T>
class AsyncStep final : public TrainerStep {
 public:
  using Body = typename TrainerMemory<T>::Body;

  AsyncStep(std::shared_ptr<AsyncMemory<T>> memory, const Body& body, double total_weight)
      : TrainerStep(memory->sums().size()), memory_(std::move(memory)), body_(body), total_weight_(total_weight) {}

  void begin(const Step& step) override {
    times_ = queues().begin_step(memory_->copies(), step.takes_part());
    outcome_ = memory_->new_outcome(times_);
  }

  [[nodiscard]] const Event* slot(DeviceId d) override { return queues().slot(d); }
  [[nodiscard]] const Event* idle(DeviceId d) override { return queues().idle(d); }
  [[nodiscard]] std::chrono::nanoseconds patience() const override { return queues().patience(); }
  void give_up(const Event& event) override { queues().give_up(event); }

  bool run(const MicroBatch& micro_batch) override {
    const DeviceId d = micro_batch.device;
    Sums& sums = memory_->sums()[d];
    Stream* const stream = queues().stream(d);
    if (queues().enter(d)) clear(sums, stream);
    const bool cold = !std::exchange(sums.warm, true);
    const bool dry = queues().begin_run(d, micro_batch.continues);
    BasicReplica<T> replica{.device = d,
                            .parameters = memory_->parameters_in(queues().space_of(d)),
                            .gradients = std::span<T>(as<T>(sums.gradients), memory_->count())};
    if (stream == nullptr) {
      *as<double>(sums.loss) += call(body_, micro_batch, replica);
    } else {
      replica.stream = stream->native();
      replica.loss_sum = as<double>(sums.loss);
      add_loss(d, call(body_, micro_batch, replica));
    }
    queues().end_run(d);
    return cold || dry;
  }

  void finish(DeviceId d) override {
    if (!ran(d)) return;
    const Sums& sums = memory_->sums()[d];
    queues().deliver(d,
                     {{sums.gradients->data(), memory_->count(), kDTypeOf<T>}, {sums.loss->data(), 1, DType::float64}});
  }

  std::vector<ReductionSegment> reduction() override {
    Stream& stream = queues().home_stream();
    T* const mean = memory_->gradients().data();
    const double scale = 1.0 / total_weight_;
    if (memory_->alone()) {
      const Sums& sums = memory_->sums().front();
      queues().reduce({}, 1.0);
      const void* const gradients[] = {sums.gradients->data()};
      stream.reduce({gradients, mean, memory_->count(), kDTypeOf<T>, scale});
      stream.copy(outcome_->loss(), sums.loss->data(), sizeof(double));
    } else {
      const BufferView outputs[] = {{mean, memory_->count(), kDTypeOf<T>}, {memory_->loss(), 1, DType::float64}};
      queues().reduce(outputs, scale);
      stream.copy(outcome_->loss(), memory_->loss(), sizeof(double));
    }
    queues().end_step();
    return {};
  }

  Objective complete() override {
    outcome_->set(memory_->alone() ? total_weight_ : 1.0, loss() / total_weight_);
    return Objective([outcome = std::move(outcome_)] { return outcome->read(); });
  }

  void abandon() override {
    outcome_.reset();  // it will have none
    queues().drain();
  }
  void stamp(std::vector<ClaimRecord>& claims) const override { times_->stamp(claims); }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }

 private:
  [[nodiscard]] DeviceQueues& queues() const noexcept { return memory_->queues(); }

  void clear(const Sums& sums, Stream* stream) const {
    if (stream == nullptr) {
      std::memset(sums.gradients->data(), 0, memory_->bytes());
      *as<double>(sums.loss) = 0.0;
    } else {
      stream->zero(sums.gradients->data(), memory_->bytes());
      stream->zero(sums.loss->data(), sizeof(double));
    }
  }

  std::shared_ptr<AsyncMemory<T>> memory_;
  const Body& body_;
  double total_weight_;
  std::shared_ptr<const StepTimes> times_;
  std::shared_ptr<Outcome> outcome_;
};

template <class T>
std::shared_ptr<TrainerStep> AsyncMemory<T>::make_step(const Body& body, double total_weight) {
  return std::make_shared<AsyncStep<T>>(this->shared_from_this(), body, total_weight);
}

}  // namespace

template <class T>
std::shared_ptr<TrainerMemory<T>> make_async_memory(const DeviceGroup& group, const DataParallelOptions& options) {
  return std::make_shared<AsyncMemory<T>>(group, options);
}

template std::shared_ptr<TrainerMemory<float>> make_async_memory(const DeviceGroup&, const DataParallelOptions&);
template std::shared_ptr<TrainerMemory<double>> make_async_memory(const DeviceGroup&, const DataParallelOptions&);

}  // namespace paceline
