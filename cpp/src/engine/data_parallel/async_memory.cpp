// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>

#include "engine/data_parallel/trainer_memory.hpp"
#include "engine/objective_state.hpp"

namespace paceline::internal {
namespace {

/// The memory of a trainer on devices that work after the call. DeviceQueues decides who waits for whom.
template <class T>
class AsyncMemory final : public TrainerMemory<T> {
 public:
  using Body = typename TrainerMemory<T>::Body;

  AsyncMemory(const DeviceGroup& group, const DataParallelOptions& options)
      : queues(group, {.stream = options.stream,
                       .run_ahead = options.run_ahead,
                       .timeout = options.timeout,
                       .collectives = options.collectives,
                       .reduce_dtype = options.reduce_dtype}) {
    const std::size_t count = options.parameter_count;
    const std::size_t bytes = count * sizeof(T);
    Stream& stream = queues.home_stream();
    const auto add_parameters = [&](std::size_t space, Stream* on) {
      parameters_in.emplace_back(keep<T>(space, queues.allocate(space, bytes, on)), count);
    };
    add_parameters(queues.home_space(), &stream);
    this->parameters = parameters_in.front();
    this->gradients = {keep<T>(queues.home_space(), home().allocate(bytes, stream)), count};
    loss = keep<double>(queues.home_space(), home().allocate(sizeof(double), stream));
    losses_.push_back(home().allocate_pinned(sizeof(double)));
    stream.zero(this->parameters.data(), bytes);
    stream.zero(this->gradients.data(), bytes);
    for (const DeviceId id : group.ids()) {
      this->sums.add(id, {.gradients = {allocate<T>(id, count), count}, .loss = allocate<double>(id, 1)});
    }
    for (std::size_t s = 1; s < queues.space_count(); ++s) {
      add_parameters(s, queues.copy_stream(s));
      copies.push_back({s, parameters_in[s].data(), this->parameters.data(), bytes});
    }
  }

  ~AsyncMemory() override {
    try {
      queues.drain();
    } catch (...) {  // interrupted; releasing pinned memory waits in any case
    }
    settle_objectives();
    // Pinned memory first, while nothing runs: its release waits for all running work, even for the release of the
    // rest.
    losses_.clear();
    pinned_.clear();
  }

  [[nodiscard]] std::shared_ptr<TrainerStep<T>> make_step(const Body& body, double total_weight) override;
  [[nodiscard]] NativeStream stream() const noexcept override { return queues.home_stream().native(); }
  [[nodiscard]] std::string transport() const override { return queues.transport(); }
  [[nodiscard]] bool failure_was_read() override { return failure_was_read_->exchange(false); }
  void settle_objectives() override {
    for_each_objective([](Objective::State& objective) { objective.settle(); });
  }
  void fail_objectives(const std::exception_ptr& error) override {
    for_each_objective([&](Objective::State& objective) { objective.fail(error); });
  }

  /// Pinned memory for a step's loss. No objective refers to it. An earlier step may still write to it, and its write
  /// comes before this step's, since both are on the home stream.
  [[nodiscard]] std::shared_ptr<Buffer> take_loss() {
    for (const std::shared_ptr<Buffer>& one : losses_) {
      if (one.use_count() == 1) return one;
    }
    return losses_.emplace_back(home().allocate_pinned(sizeof(double)));
  }

  /// An objective of what the step has written to `loss`, plus `known`. It may outlive the trainer.
  [[nodiscard]] Objective objective(std::shared_ptr<const StepTimes> times, std::shared_ptr<Buffer> written,
                                    double known) {
    std::erase_if(objectives_, [](const auto& one) { return one.expired(); });
    auto state = std::make_shared<Objective::State>(
        [times = std::move(times), written = std::move(written), known, failure_was_read = failure_was_read_] {
          try {
            times->wait();
          } catch (const Error&) {
            failure_was_read->store(true);
            throw;
          }
          return *static_cast<const double*>(written->data()) + known;
        });
    objectives_.push_back(state);
    return Objective::State::objective(std::move(state));
  }

  DeviceQueues queues;
  std::vector<std::span<T>> parameters_in;  // each memory space, home's first
  std::vector<SpaceCopy> copies;
  double* loss = nullptr;  // the sum of all devices' losses, at home

 private:
  template <class Call>
  void for_each_objective(const Call& call) {
    for (const std::weak_ptr<Objective::State>& objective : std::exchange(objectives_, {})) {
      if (const auto unread = objective.lock()) call(*unread);
    }
  }

  [[nodiscard]] AsyncDevice& home() const { return queues.maker(queues.home_space()); }

  template <class Element>
  Element* keep(std::size_t space, std::unique_ptr<Buffer> buffer) {
    auto& kept = queues.on_host(space) ? pinned_ : on_gpus_;
    return static_cast<Element*>(kept.emplace_back(std::move(buffer))->data());
  }

  /// Memory of a device; pinned for a host device.
  template <class Element>
  Element* allocate(DeviceId device, std::size_t count) {
    const std::size_t space = queues.space_of(device);
    const std::size_t bytes = count * sizeof(Element);
    AsyncDevice& maker = queues.maker(space);
    return keep<Element>(
        space, queues.on_host(space) ? maker.allocate_pinned(bytes) : maker.allocate(bytes, *queues.stream(device)));
  }

  std::vector<std::unique_ptr<Buffer>> on_gpus_;
  std::vector<std::unique_ptr<Buffer>> pinned_;
  std::vector<std::shared_ptr<Buffer>> losses_;
  std::shared_ptr<std::atomic<bool>> failure_was_read_ = std::make_shared<std::atomic<bool>>(false);
  std::vector<std::weak_ptr<Objective::State>> objectives_;
};

template <class T>
class AsyncStep final : public TrainerStep<T> {
 public:
  AsyncStep(std::shared_ptr<AsyncMemory<T>> memory, const typename TrainerMemory<T>::Body& body, double total_weight)
      : TrainerStep<T>(memory, body, total_weight), async_(*memory), queues_(memory->queues) {}

  void begin(const Step& step) override {
    times_ = queues_.begin_step(async_.copies, step.takes_part());
    const BufferView outputs[] = {view(async_.gradients), {async_.loss, 1, DType::float64}};
    queues_.expect(outputs, 1.0 / this->total_weight_);
    loss_ = async_.take_loss();
  }

  [[nodiscard]] const Event* slot(DeviceId d) override { return queues_.slot(d); }
  [[nodiscard]] const Event* idle(DeviceId d) override { return queues_.idle(d); }
  [[nodiscard]] std::chrono::nanoseconds patience() const override { return queues_.patience(); }
  void give_up(const Event& event) override { queues_.give_up(event); }

  bool run(const MicroBatch& micro_batch) override {
    const DeviceId d = micro_batch.device;
    const auto& sums = async_.sums[d];
    Stream* const stream = queues_.stream(d);
    if (queues_.enter(d)) clear(sums, stream);
    const bool dry = queues_.begin_run(d, micro_batch.continues);
    BasicReplica<T> replica{
        .device = d, .parameters = async_.parameters_in[queues_.space_of(d)], .gradients = sums.gradients};
    if (stream != nullptr) {
      replica.stream = stream->native();
      replica.loss_sum = sums.loss;
    }
    const bool cold = this->call(micro_batch, replica);
    queues_.end_run(d);
    return cold || dry;
  }

  void finish(DeviceId d) override {
    if (!this->ran(d)) return;
    const auto& sums = async_.sums[d];
    queues_.deliver(d, {view(sums.gradients), {sums.loss, 1, DType::float64}});
  }

  std::vector<ReductionSegment> reduction() override {
    queues_.reduce();
    queues_.home_stream().copy(loss_->data(), async_.loss, sizeof(double));
    queues_.end_step();
    return {};
  }

  Objective complete() override {
    return async_.objective(times_, std::move(loss_), this->loss() / this->total_weight_);
  }
  void abandon() override {
    loss_.reset();
    queues_.drain();
  }
  void stamp(std::vector<ClaimRecord>& claims) const override { times_->stamp(claims); }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }

 private:
  static BufferView view(std::span<T> values) { return {values.data(), values.size(), kDTypeOf<T>}; }

  static void clear(const typename TrainerMemory<T>::Sums& sums, Stream* stream) {
    if (stream == nullptr) {
      std::memset(sums.gradients.data(), 0, sums.gradients.size_bytes());
      *sums.loss = 0.0;  // and stays 0: the body returns its losses
    } else {
      stream->zero(sums.gradients.data(), sums.gradients.size_bytes());
      stream->zero(sums.loss, sizeof(double));
    }
  }

  AsyncMemory<T>& async_;  // the same as memory_
  DeviceQueues& queues_;
  std::shared_ptr<const StepTimes> times_;
  std::shared_ptr<Buffer> loss_;
};

template <class T>
std::shared_ptr<TrainerStep<T>> AsyncMemory<T>::make_step(const Body& body, double total_weight) {
  return std::make_shared<AsyncStep<T>>(std::static_pointer_cast<AsyncMemory>(this->shared_from_this()), body,
                                        total_weight);
}

}  // namespace

template <class T>
std::shared_ptr<TrainerMemory<T>> make_async_memory(const DeviceGroup& group, const DataParallelOptions& options) {
  return std::make_shared<AsyncMemory<T>>(group, options);
}

template std::shared_ptr<TrainerMemory<float>> make_async_memory(const DeviceGroup&, const DataParallelOptions&);
template std::shared_ptr<TrainerMemory<double>> make_async_memory(const DeviceGroup&, const DataParallelOptions&);

}  // namespace paceline::internal
