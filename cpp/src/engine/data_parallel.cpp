// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/data_parallel.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include <paceline/comm/buffer_view.hpp>
#include <paceline/engine/block_reduction.hpp>
#include <paceline/engine/stepper.hpp>
#include <paceline/error.hpp>

namespace paceline {
namespace {

template <class T>
constexpr DType kDType = std::is_same_v<T, float> ? DType::float32 : DType::float64;

/// One step's work on the workers.
template <class T>
class Program final : public StepProgram {
 public:
  Program(std::size_t device_count, std::size_t parameter_count)
      : gradients_(device_count, std::vector<T>(parameter_count)),
        scratch_(parameter_count),
        ran_(device_count),
        losses_(device_count) {}

  void begin_step(std::span<const T> parameters, const typename BasicDataParallel<T>::Body* body, double total_weight) {
    parameters_ = parameters;
    body_ = body;
    total_weight_ = total_weight;
    std::fill(ran_.begin(), ran_.end(), 0);
    std::fill(losses_.begin(), losses_.end(), 0.0);
  }

  bool run(const MicroBatch& micro_batch) override {
    const std::size_t d = micro_batch.device_index;
    // Cleared by the device itself, on its own core, and only when it has work.
    if (ran_[d] == 0) std::fill(gradients_[d].begin(), gradients_[d].end(), T{0});
    BasicReplica<T> replica{.device_index = d, .parameters = parameters_, .gradients = gradients_[d]};
    losses_[d] += (*body_)(micro_batch, replica);
    return std::exchange(ran_[d], 1) == 0 && std::exchange(warm_[d], 1) == 0;
  }

  std::unique_ptr<BlockReduction> reduction() override {
    ReductionSegment segment{
        .output = scratch_.data(), .count = scratch_.size(), .dtype = kDType<T>, .scale = 1.0 / total_weight_};
    for (std::size_t d = 0; d < gradients_.size(); ++d) {
      if (ran_[d] != 0) segment.inputs.push_back(gradients_[d].data());
    }
    return std::make_unique<BlockReduction>(std::vector<ReductionSegment>{std::move(segment)});
  }

  /// Swaps the finished gradients out, so that committing costs nothing.
  void commit(std::vector<T>& gradients) { std::swap(gradients, scratch_); }

  [[nodiscard]] double objective() const {
    double sum = 0.0;
    for (const double loss : losses_) sum += loss;
    return sum / total_weight_;
  }

 private:
  std::vector<std::vector<T>> gradients_;
  std::vector<T> scratch_;
  std::vector<int> ran_;
  std::vector<int> warm_ = std::vector<int>(gradients_.size(), 0);
  std::vector<double> losses_;
  std::span<const T> parameters_;
  const typename BasicDataParallel<T>::Body* body_ = nullptr;
  double total_weight_ = 1.0;
};

StepperOptions stepper_options(const DataParallelOptions& options) {
  return {.balance = options.balance,
          .weights = options.weights,
          .micro_batch = options.micro_batch,
          .granularity = options.granularity};
}

}  // namespace

template <class T>
struct BasicDataParallel<T>::State {
  State(DeviceGroup group, const DataParallelOptions& options)
      : program(std::make_shared<Program<T>>(group.size(), options.parameter_count)),
        stepper(std::move(group), stepper_options(options)),
        parameters(options.parameter_count),
        gradients(options.parameter_count) {}

  std::shared_ptr<Program<T>> program;
  Stepper stepper;
  std::vector<T> parameters;
  std::vector<T> gradients;
  std::vector<std::int64_t> shares;
};

template <class T>
BasicDataParallel<T>::BasicDataParallel(DeviceGroup group, DataParallelOptions options) {
  if (options.parameter_count == 0) {
    throw InvalidArgument(
        "DataParallel: parameter_count is 0. Give the number of elements of the flat parameter vector.");
  }
  const auto no_memory = [&] {
    return OutOfMemory(
        fmt::format("DataParallel: no memory for {} parameters: they are kept once, and their gradients "
                    "once for each device and twice more.",
                    options.parameter_count));
  };
  try {
    state_ = std::make_unique<State>(std::move(group), options);
  } catch (const std::bad_alloc&) {
    throw no_memory();
  } catch (const std::length_error&) {
    throw no_memory();
  }
}

template <class T>
BasicDataParallel<T>::~BasicDataParallel() = default;

template <class T>
double BasicDataParallel<T>::step(std::int64_t batch_size, const Body& body, std::optional<double> total_weight) {
  if (batch_size < 1) {
    throw InvalidArgument(fmt::format("step: a batch of {} items; at least one is needed.", batch_size));
  }
  const double weight = total_weight.value_or(static_cast<double>(batch_size));
  if (!std::isfinite(weight) || weight <= 0.0) {
    throw InvalidArgument(
        fmt::format("step: the total weight is {}; the objective is divided by it, so it must be "
                    "positive and finite. Skip batches without weight.",
                    weight));
  }
  State& state = *state_;
  state.stepper.require_idle();  // the program is still that step's
  state.program->begin_step(state.parameters, &body, weight);
  const std::unique_ptr<Step> step = state.stepper.begin(batch_size, state.program);
  step->wait();
  step->rethrow_failure();
  state.program->commit(state.gradients);
  state.stepper.commit(*step);
  state.shares = state.stepper.last_step().items(state.stepper.group().size());
  return state.program->objective();
}

template <class T>
std::span<T> BasicDataParallel<T>::parameters() noexcept {
  return state_->parameters;
}
template <class T>
std::span<T> BasicDataParallel<T>::gradients() noexcept {
  return state_->gradients;
}
template <class T>
const std::vector<std::int64_t>& BasicDataParallel<T>::shares() const noexcept {
  return state_->shares;
}
template <class T>
const StepRecord& BasicDataParallel<T>::last_step() const noexcept {
  return state_->stepper.last_step();
}
template <class T>
std::string BasicDataParallel<T>::explain() const {
  return state_->stepper.balancer().explain();
}
template <class T>
const DeviceGroup& BasicDataParallel<T>::group() const noexcept {
  return state_->stepper.group();
}

template class BasicDataParallel<float>;
template class BasicDataParallel<double>;

}  // namespace paceline
