// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <paceline/engine/block_reduction.hpp>
#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/async.hpp>

#include "engine/trainer_program.hpp"

namespace paceline {
namespace {

/// Of one device, in its memory; pinned on the host.
struct Sums {
  std::unique_ptr<Buffer> gradients;
  std::unique_ptr<Buffer> loss;
  bool warm = false;
};

template <class T>
T* as(const std::unique_ptr<Buffer>& buffer) {
  return static_cast<T*>(buffer->data());
}

/// The step on devices that work after the call. Who waits for whom is DeviceQueues'; here is the memory.
template <class T>
class AsyncProgram final : public TrainerProgram<T> {
 public:
  using Body = typename TrainerProgram<T>::Body;

  AsyncProgram(const DeviceGroup& group, const DataParallelOptions& options)
      : count_(options.parameter_count),
        queues_(group, {.stream = options.stream,
                        .run_ahead = options.run_ahead,
                        .timeout = options.timeout,
                        .collectives = options.collectives}),
        sums_(group.size()) {
    Stream& stream = queues_.home_stream();
    parameters_ = queues_.allocate(queues_.home_space(), bytes(), &stream);
    committed_ = home().allocate(bytes(), stream);
    if (!alone()) {
      scratch_ = home().allocate(bytes(), stream);
      loss_ = home().allocate(sizeof(double), stream);
    }
    objective_ = home().allocate_pinned(sizeof(double));
    stream.zero(parameters_->data(), bytes());
    stream.zero(committed_->data(), bytes());
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

  ~AsyncProgram() override {
    try {
      queues_.drain();
    } catch (...) {  // somebody does not want to wait; giving pinned memory back still does
    }
    // Pinned memory first, while nothing runs: giving it back waits for all that does, be it the release of the rest.
    objective_.reset();
    for (std::size_t d = 0; d < sums_.size(); ++d) {
      if (queues_.on_host(queues_.space_of(d))) sums_[d] = {};
    }
    for (std::size_t s = 0; s < foreign_.size(); ++s) {
      if (queues_.on_host(s)) foreign_[s].reset();
    }
  }

  void begin_step(const Body& body, double total_weight) override {
    body_ = &body;
    total_weight_ = total_weight;
    std::fill(ran_.begin(), ran_.end(), char{0});
    times_ = queues_.begin_step(copies_);
  }

  void pace(std::size_t d) override { queues_.pace(d); }
  void catch_up(std::size_t d) override { queues_.catch_up(d); }

  bool run(const MicroBatch& micro_batch) override {
    const std::size_t d = micro_batch.device_index;
    Stream* const stream = queues_.stream(d);
    if (queues_.enter(d)) clear(sums_[d], stream);
    const bool cold = !std::exchange(sums_[d].warm, true);
    const bool dry = queues_.begin_run(d);
    const std::size_t space = queues_.space_of(d);
    const std::unique_ptr<Buffer>& parameters = space == queues_.home_space() ? parameters_ : foreign_[space];
    BasicReplica<T> replica{.device_index = d,
                            .parameters = std::span<const T>(as<T>(parameters), count_),
                            .gradients = std::span<T>(as<T>(sums_[d].gradients), count_)};
    if (stream == nullptr) {
      *as<double>(sums_[d].loss) += (*body_)(micro_batch, replica);
    } else {
      replica.stream = stream->native();
      replica.loss_sum = as<double>(sums_[d].loss);
      (*body_)(micro_batch, replica);
    }
    queues_.end_run(d);
    ran_[d] = 1;
    return cold || dry;
  }

  void finish(std::size_t d) override {
    if (ran_[d] == 0) return;
    queues_.deliver(d, {{sums_[d].gradients->data(), count_, kDTypeOf<T>}, {sums_[d].loss->data(), 1, DType::float64}});
  }

  std::unique_ptr<BlockReduction> reduction() override {
    if (alone()) {
      keep_sums();
      return nullptr;
    }
    const BufferView outputs[] = {{scratch_->data(), count_, kDTypeOf<T>}, {loss_->data(), 1, DType::float64}};
    queues_.reduce(outputs, 1.0 / total_weight_);
    queues_.home_stream().copy(objective_->data(), loss_->data(), sizeof(double));
    queues_.end_step();
    return nullptr;
  }

  double complete() override {
    times_->wait();
    std::swap(committed_, alone() ? sums_.front().gradients : scratch_);
    return *as<double>(objective_) / (alone() ? total_weight_ : 1.0);
  }

  void stop() noexcept override { queues_.stop(); }
  void abandon() override { queues_.drain(); }
  void stamp(std::vector<ClaimRecord>& claims) const override { times_->stamp(claims); }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }

  std::span<T> parameters() noexcept override { return {as<T>(parameters_), count_}; }
  std::span<T> gradients() noexcept override { return {as<T>(committed_), count_}; }
  [[nodiscard]] void* stream() const noexcept override { return queues_.home_stream().native(); }
  [[nodiscard]] std::string transport() const override { return queues_.transport(); }

 private:
  /// Then its sums are the result, and lie where the caller finds them once they are committed.
  [[nodiscard]] bool alone() const noexcept { return sums_.size() == 1; }

  /// Nothing is reduced. What is left of it is the objective's own division, in place.
  void keep_sums() {
    const Sums& sums = sums_.front();
    Stream& stream = queues_.home_stream();
    queues_.reduce({}, 1.0);
    if (total_weight_ != 1.0) {
      const void* const gradients[] = {sums.gradients->data()};
      stream.reduce({gradients, sums.gradients->data(), count_, kDTypeOf<T>, 1.0 / total_weight_});
    }
    stream.copy(objective_->data(), sums.loss->data(), sizeof(double));
    queues_.end_step();
  }

  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }
  [[nodiscard]] AsyncDevice& home() const { return queues_.maker(queues_.home_space()); }

  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::size_t space, Stream* stream, std::size_t size) const {
    AsyncDevice& maker = queues_.maker(space);
    return queues_.on_host(space) ? maker.allocate_pinned(size) : maker.allocate(size, *stream);
  }

  void clear(const Sums& sums, Stream* stream) const {
    if (stream == nullptr) {
      std::memset(sums.gradients->data(), 0, bytes());
      *as<double>(sums.loss) = 0.0;
    } else {
      stream->zero(sums.gradients->data(), bytes());
      stream->zero(sums.loss->data(), sizeof(double));
    }
  }

  std::size_t count_;
  DeviceQueues queues_;
  std::vector<Sums> sums_;
  std::vector<char> ran_ = std::vector<char>(sums_.size());  // in this step; each entry is its worker's
  std::vector<std::unique_ptr<Buffer>> foreign_;             // the parameters of spaces that are not home
  std::vector<SpaceCopy> copies_;
  std::unique_ptr<Buffer> parameters_;
  std::unique_ptr<Buffer> committed_;
  std::unique_ptr<Buffer> scratch_;  // null for one device, as is loss_
  std::unique_ptr<Buffer> loss_;
  std::unique_ptr<Buffer> objective_;
  std::shared_ptr<const StepTimes> times_;
  const Body* body_ = nullptr;
  double total_weight_ = 1.0;
};

}  // namespace

template <class T>
std::shared_ptr<TrainerProgram<T>> make_async_program(const DeviceGroup& group, const DataParallelOptions& options) {
  return std::make_shared<AsyncProgram<T>>(group, options);
}

template std::shared_ptr<TrainerProgram<float>> make_async_program(const DeviceGroup&, const DataParallelOptions&);
template std::shared_ptr<TrainerProgram<double>> make_async_program(const DeviceGroup&, const DataParallelOptions&);

}  // namespace paceline
