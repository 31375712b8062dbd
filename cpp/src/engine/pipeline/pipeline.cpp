// SPDX-License-Identifier: Apache-2.0
#include <paceline/engine/pipeline.hpp>

#include <utility>

#include "engine/dtype_of.hpp"
#include "engine/pipeline/pipeline_core.hpp"

namespace paceline {
namespace {

template <class T>
std::span<T> span_of(std::byte* data, std::size_t count) {
  return {reinterpret_cast<T*>(data), count};
}

template <class T>
BasicBlockRun<T> run_of(const internal::PipelineCore& core, const internal::BlockCall& call, bool backward) {
  const PipelineBlock& sizes = core.sizes(call.block);
  const auto items = static_cast<std::size_t>(call.end - call.begin);
  const std::size_t inputs = call.input == nullptr ? 0 : items * core.input_count(call.block);
  BasicBlockRun<T> run{.block = call.block,
                       .device = call.device,
                       .micro_batch = call.micro_batch,
                       .begin = call.begin,
                       .end = call.end,
                       .parameters = span_of<T>(call.memory->parameters, sizes.parameter_count),
                       .input = span_of<T>(call.input, inputs),
                       .output = span_of<T>(call.output, items * sizes.output_count),
                       .saved = span_of<T>(call.saved, items * sizes.saved_count),
                       .stream = call.stream,
                       .loss_sum = call.loss_sum};
  if (!backward) return run;
  run.output_gradient = span_of<T>(call.output_gradient, items * sizes.output_count);
  run.input_gradient = span_of<T>(call.input_gradient, inputs);
  run.gradients = span_of<T>(call.memory->sums, sizes.parameter_count);
  return run;
}

}  // namespace

template <class T>
struct BasicPipeline<T>::State {
  internal::PipelineCore core;
};

template <class T>
BasicPipeline<T>::BasicPipeline(DeviceGroup group, PipelineOptions options)
    : state_(new State{internal::PipelineCore(group.share(), options, kDTypeOf<T>)}) {}

template <class T>
BasicPipeline<T>::~BasicPipeline() = default;

template <class T>
Objective BasicPipeline<T>::step(std::int64_t batch_size, const Forward& forward, const Backward& backward,
                                 std::optional<double> total_weight) {
  const internal::PipelineCore& core = state_->core;
  const internal::BlockCalls calls{
      .forward = [&](const internal::BlockCall& call) { return forward(run_of<T>(core, call, false)); },
      .backward = [&](const internal::BlockCall& call) { backward(run_of<T>(core, call, true)); }};
  return state_->core.step(batch_size, calls, total_weight.value_or(static_cast<double>(batch_size)));
}

template <class T>
void BasicPipeline<T>::update(const std::function<void(const Update&)>& body) {
  state_->core.update([&](std::size_t block, internal::BlockMemory& memory, NativeStream stream) {
    const PipelineBlock& sizes = state_->core.sizes(block);
    body({.block = block,
          .device = memory.device,
          .parameters = span_of<T>(memory.parameters, sizes.parameter_count),
          .gradients = span_of<T>(memory.gradients, sizes.parameter_count),
          .state = span_of<T>(memory.state, sizes.state_count),
          .stream = stream});
  });
}

template <class T>
std::span<T> BasicPipeline<T>::parameters(std::size_t block) {
  std::byte* const data = state_->core.block(block).parameters;  // first, since it checks the number
  return span_of<T>(data, state_->core.sizes(block).parameter_count);
}

template <class T>
std::span<T> BasicPipeline<T>::gradients(std::size_t block) {
  std::byte* const data = state_->core.block(block).gradients;  // first, since it checks the number
  return span_of<T>(data, state_->core.sizes(block).parameter_count);
}

template <class T>
std::span<T> BasicPipeline<T>::state(std::size_t block) {
  std::byte* const data = state_->core.block(block).state;  // first, since it checks the number
  return span_of<T>(data, state_->core.sizes(block).state_count);
}

template <class T>
NativeStream BasicPipeline<T>::stream(std::size_t block) const {
  return state_->core.stream(state_->core.block(block).device);
}

template <class T>
void BasicPipeline<T>::retire(std::string_view device) {
  state_->core.planner().retire(group().place(group().id(device)));
}

template <class T>
void BasicPipeline<T>::restore(std::string_view device) {
  state_->core.planner().restore(group().place(group().id(device)));
}

template <class T>
const plan::StagePlan& BasicPipeline<T>::plan() const noexcept {
  return state_->core.plan();
}

template <class T>
bool BasicPipeline<T>::measuring() const noexcept {
  return state_->core.planner().measures();
}

template <class T>
const PipelineRecord& BasicPipeline<T>::last_step() const noexcept {
  return state_->core.last_step();
}

template <class T>
std::vector<balance::StageMove> BasicPipeline<T>::recent_moves() const {
  return state_->core.planner().recent_moves();
}

template <class T>
const StageLog& BasicPipeline<T>::log() const noexcept {
  return state_->core.log();
}

template <class T>
std::string BasicPipeline<T>::explain() const {
  return state_->core.planner().explain();
}

template <class T>
const DeviceGroup& BasicPipeline<T>::group() const noexcept {
  return state_->core.group();
}

template class BasicPipeline<float>;
template class BasicPipeline<double>;

}  // namespace paceline
