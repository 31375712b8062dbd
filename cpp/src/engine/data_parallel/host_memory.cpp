// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "engine/data_parallel/trainer_memory.hpp"

namespace paceline {
namespace {

/// The sums of one device.
template <class T>
struct Sums {
  std::vector<T> gradients;
  bool warm = false;  // whether it has run before
};

template <class T>
struct HostMemory final : TrainerMemory<T>, std::enable_shared_from_this<HostMemory<T>> {
  using Body = typename TrainerMemory<T>::Body;

  HostMemory(std::size_t device_count, std::size_t parameter_count)
      : parameters_(parameter_count), mean(parameter_count), sums(device_count, {std::vector<T>(parameter_count)}) {}

  [[nodiscard]] std::shared_ptr<TrainerStep> make_step(const Body& body, double total_weight) override;
  [[nodiscard]] std::span<T> parameters() noexcept override { return parameters_; }
  [[nodiscard]] std::span<T> gradients() noexcept override { return mean; }

  std::vector<T> parameters_;
  std::vector<T> mean;        // written only when every device has succeeded: a reduction of host memory cannot fail
  std::vector<Sums<T>> sums;  // each entry is its worker's
};

template <class T>
class HostStep final : public TrainerStep {
 public:
  using Body = typename TrainerMemory<T>::Body;

  HostStep(std::shared_ptr<HostMemory<T>> memory, const Body& body, double total_weight)
      : TrainerStep(memory->sums.size()), memory_(std::move(memory)), body_(body), total_weight_(total_weight) {}

  void begin(const Step&) override {}

  bool run(const MicroBatch& micro_batch) override {
    const DeviceId d = micro_batch.device;
    auto& [sum, warm] = memory_->sums[d];
    // Cleared by the device itself, on its own core, and only when it has work.
    if (!ran(d)) std::fill(sum.begin(), sum.end(), T{0});
    BasicReplica<T> replica{.device = d, .parameters = memory_->parameters_, .gradients = sum};
    add_loss(d, call(body_, micro_batch, replica));
    return !std::exchange(warm, true);
  }

  std::vector<ReductionSegment> reduction() override {
    ReductionSegment segment{.output = memory_->mean.data(),
                             .count = memory_->mean.size(),
                             .dtype = kDTypeOf<T>,
                             .scale = 1.0 / total_weight_};
    for (std::size_t d = 0; d < memory_->sums.size(); ++d) {
      if (ran(d)) segment.inputs.push_back(memory_->sums[d].gradients.data());
    }
    return {std::move(segment)};
  }

  Objective complete() override { return Objective(loss() / total_weight_); }

  void abandon() override {}

 private:
  std::shared_ptr<HostMemory<T>> memory_;
  const Body& body_;
  double total_weight_;
};

template <class T>
std::shared_ptr<TrainerStep> HostMemory<T>::make_step(const Body& body, double total_weight) {
  return std::make_shared<HostStep<T>>(this->shared_from_this(), body, total_weight);
}

}  // namespace

template <class T>
std::shared_ptr<TrainerMemory<T>> make_host_memory(const DeviceGroup& group, const DataParallelOptions& options) {
  return std::make_shared<HostMemory<T>>(group.size(), options.parameter_count);
}

template std::shared_ptr<TrainerMemory<float>> make_host_memory(const DeviceGroup&, const DataParallelOptions&);
template std::shared_ptr<TrainerMemory<double>> make_host_memory(const DeviceGroup&, const DataParallelOptions&);

}  // namespace paceline
