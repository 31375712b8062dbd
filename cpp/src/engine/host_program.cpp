// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <paceline/engine/block_reduction.hpp>

#include "engine/trainer_program.hpp"

namespace paceline {
namespace {

template <class T>
class HostProgram final : public TrainerProgram<T> {
 public:
  using Body = typename TrainerProgram<T>::Body;

  HostProgram(std::size_t device_count, std::size_t parameter_count)
      : parameters_(parameter_count),
        committed_(parameter_count),
        gradients_(device_count, std::vector<T>(parameter_count)),
        scratch_(parameter_count),
        ran_(device_count),
        warm_(device_count),
        losses_(device_count) {}

  void begin_step(const Body& body, double total_weight) override {
    body_ = &body;
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
        .output = scratch_.data(), .count = scratch_.size(), .dtype = kDTypeOf<T>, .scale = 1.0 / total_weight_};
    for (std::size_t d = 0; d < gradients_.size(); ++d) {
      if (ran_[d] != 0) segment.inputs.push_back(gradients_[d].data());
    }
    return std::make_unique<BlockReduction>(std::vector<ReductionSegment>{std::move(segment)});
  }

  double complete() override {
    std::swap(committed_, scratch_);  // committing costs nothing
    double sum = 0.0;
    for (const double loss : losses_) sum += loss;
    return sum / total_weight_;
  }

  void abandon() override {}

  std::span<T> parameters() noexcept override { return parameters_; }
  std::span<T> gradients() noexcept override { return committed_; }

 private:
  std::vector<T> parameters_;
  std::vector<T> committed_;
  std::vector<std::vector<T>> gradients_;
  std::vector<T> scratch_;
  std::vector<int> ran_;
  std::vector<int> warm_;
  std::vector<double> losses_;
  const Body* body_ = nullptr;
  double total_weight_ = 1.0;
};

}  // namespace

template <class T>
std::shared_ptr<TrainerProgram<T>> make_host_program(const DeviceGroup& group, const DataParallelOptions& options) {
  return std::make_shared<HostProgram<T>>(group.size(), options.parameter_count);
}

template std::shared_ptr<TrainerProgram<float>> make_host_program(const DeviceGroup&, const DataParallelOptions&);
template std::shared_ptr<TrainerProgram<double>> make_host_program(const DeviceGroup&, const DataParallelOptions&);

}  // namespace paceline
