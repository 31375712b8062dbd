// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/data_parallel.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include <paceline/engine/step_loop.hpp>
#include <paceline/error.hpp>
#include <paceline/plan/split.hpp>

#include "engine/data_parallel/trainer_memory.hpp"
#include "engine/loop/item_work.hpp"
#include "engine/objective_state.hpp"

namespace paceline {
namespace {

template <class T>
std::shared_ptr<internal::TrainerMemory<T>> make_memory(const DeviceGroup& group, const DataParallelOptions& options) {
  if (group.asynchronous()) return internal::make_async_memory<T>(group, options);
  return std::make_shared<internal::TrainerMemory<T>>(group.ids(), options.parameter_count);
}

StepLoopOptions step_loop_options(const DataParallelOptions& options) {
  return {.balance = options.balance,
          .weights = options.weights,
          .micro_batch = options.micro_batch,
          .granularity = options.granularity,
          .corrections = options.corrections,
          .run_ahead = options.run_ahead,
          .memory_limits = options.memory_limits,
          .search_sizes = options.search_sizes.value_or(options.balance == Balance::automatic &&
                                                        options.corrections.value_or(true))};
}

constexpr std::size_t kUpdateBlock = 1024;                // elements; parts made of whole blocks share no cache line
constexpr std::int64_t kUpdatePartsPerDevice = 2;         // so that nobody waits for a device that starts late
constexpr std::int64_t kLeastUpdateBlocksPerDevice = 64;  // waking a worker takes as long as many thousand elements

/// An update as a step: its items are blocks of parameters.
class UpdateProgram final : public StepProgram {
 public:
  UpdateProgram(std::function<void(std::size_t, std::size_t)> body, std::size_t count)
      : body_(std::move(body)), count_(count) {}

  bool run(const MicroBatch& micro_batch) override {
    const auto at = [this](std::int64_t block) {
      return std::min(static_cast<std::size_t>(block) * kUpdateBlock, count_);
    };
    body_(at(micro_batch.begin), at(micro_batch.end));
    return false;
  }

 private:
  std::function<void(std::size_t, std::size_t)> body_;
  std::size_t count_;
};

}  // namespace

template <class T>
struct BasicDataParallel<T>::State {
  State(const DeviceGroup& group, const DataParallelOptions& options)
      : memory(make_memory<T>(group, options)), step_loop(group, step_loop_options(options)) {}

  /// `batch`: how many items, or the cost of each.
  template <class Batch>
  Objective run(const Batch& batch, const Body& body, double weight) {
    internal::check_weight(weight);
    step_loop.require_idle();  // the memory is still that step's
    const std::shared_ptr<internal::TrainerStep<T>> program = memory->make_step(body, weight);
    if (memory->failure_was_read()) {
      program->abandon();
      step_loop.forget_unsettled();
    }
    std::shared_ptr<Step> step;
    noting_failures([&] { step = step_loop.prepare(step_loop.plan(batch), program); });
    try {
      noting_failures([&] { program->begin(*step); });
      step->start();
    } catch (...) {  // the group may have been closed
      program->abandon();
      throw;
    }
    step->wait();
    if (step->failure() != nullptr) {
      program->abandon();
      memory->settle_objectives();
      try {
        step->rethrow_failure();
      } catch (const OutOfMemory&) {
        if (!step_loop.shrink(*step)) throw;
      }
      return run(batch, body, weight);
    }
    Objective objective = program->complete();
    shares = step->items();
    noting_failures([&] { step_loop.commit(step); });
    return objective;
  }

  /// Makes a call that may find that an earlier step has failed on its device. The error is thrown once, here, and to
  /// whoever reads an objective that nobody has read yet.
  template <class Call>
  void noting_failures(const Call& call) {
    try {
      call();
    } catch (const InvalidArgument&) {
      throw;
    } catch (const Error&) {
      memory->fail_objectives(std::current_exception());
      throw;
    }
  }

  std::shared_ptr<internal::TrainerMemory<T>> memory;
  StepLoop step_loop;
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
                    "once for each device and once more.",
                    options.parameter_count));
  };
  try {
    state_ = std::make_unique<State>(group, options);
  } catch (const std::bad_alloc&) {
    throw no_memory();
  } catch (const std::length_error&) {
    throw no_memory();
  }
}

template <class T>
BasicDataParallel<T>::~BasicDataParallel() = default;

template <class T>
Objective BasicDataParallel<T>::step(std::int64_t batch_size, const Body& body, std::optional<double> total_weight) {
  if (batch_size < 1) {
    throw InvalidArgument(fmt::format("step: a batch of {} items; at least one is needed.", batch_size));
  }
  return state_->run(batch_size, body, total_weight.value_or(static_cast<double>(batch_size)));
}

template <class T>
Objective BasicDataParallel<T>::step(std::span<const double> costs, const Body& body,
                                     std::optional<double> total_weight) {
  internal::check_costs(costs);
  return state_->run(costs, body, total_weight.value_or(static_cast<double>(costs.size())));
}

template <class T>
void BasicDataParallel<T>::update(const Update& body) {
  const DeviceGroup& group = state_->step_loop.group();
  state_->step_loop.require_idle();
  const std::size_t count = parameters().size();
  std::vector<double> works;
  for (const DeviceId id : group.ids()) works.push_back(state_->step_loop.retired(id) ? 0.0 : 1.0);
  const auto devices = std::count(works.begin(), works.end(), 1.0);
  const auto blocks = static_cast<std::int64_t>((count + kUpdateBlock - 1) / kUpdateBlock);
  if (devices == 1 || group.asynchronous() || blocks < devices * kLeastUpdateBlocksPerDevice) return body(0, count);
  const std::int64_t parts = devices * kUpdatePartsPerDevice;
  Step step(group, std::make_shared<UpdateProgram>(body, count),
            {.shares = plan::split_weighted(blocks, works), .micro_batch = (blocks + parts - 1) / parts});
  step.start();
  step.wait();
  if (step.failure() != nullptr) std::rethrow_exception(step.failure()->error);
}

template <class T>
void BasicDataParallel<T>::retire(std::string_view device) {
  state_->step_loop.retire(group().id(device));
}
template <class T>
void BasicDataParallel<T>::restore(std::string_view device) {
  state_->step_loop.restore(group().id(device));
}
template <class T>
std::vector<std::optional<plan::CostModel>> BasicDataParallel<T>::speeds(bool by_cost) {
  state_->step_loop.settle();
  return state_->step_loop.speeds(by_cost);
}
template <class T>
void BasicDataParallel<T>::hint(const std::vector<std::optional<plan::CostModel>>& models, bool by_cost) {
  state_->step_loop.hint(models, by_cost);
}
template <class T>
std::span<T> BasicDataParallel<T>::parameters() noexcept {
  return state_->memory->parameters;
}
template <class T>
std::span<T> BasicDataParallel<T>::gradients() noexcept {
  return state_->memory->gradients;
}
template <class T>
NativeStream BasicDataParallel<T>::stream() const noexcept {
  return state_->memory->stream();
}
template <class T>
const std::vector<std::int64_t>& BasicDataParallel<T>::shares() const noexcept {
  return state_->shares;
}
template <class T>
const StepRecord& BasicDataParallel<T>::last_step() const noexcept {
  return state_->step_loop.last_step();
}
template <class T>
std::vector<MemoryReport> BasicDataParallel<T>::memory_report() const {
  return state_->step_loop.memory_report();
}

template <class T>
std::optional<ItemReport> BasicDataParallel<T>::item_report() const {
  return state_->step_loop.item_report();
}
template <class T>
std::string BasicDataParallel<T>::explain() const {
  const std::string transport = state_->memory->transport();
  return state_->step_loop.explain() + (transport.empty() ? "" : fmt::format("Between GPUs: {}.\n", transport));
}
template <class T>
const DeviceGroup& BasicDataParallel<T>::group() const noexcept {
  return state_->step_loop.group();
}

template class BasicDataParallel<float>;
template class BasicDataParallel<double>;

}  // namespace paceline
