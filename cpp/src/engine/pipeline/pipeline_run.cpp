// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/pipeline_run.hpp"

#include <utility>

namespace paceline::internal {

using Kind = plan::Action::Kind;

PipelineRun::PipelineRun(PipelineMemory& memory, std::shared_ptr<const plan::StagePlan> plan, BlockCalls calls,
                         std::shared_ptr<StepMarks> marks, bool each_block)
    : memory_(memory),
      devices_(memory.devices()),
      plan_(std::move(plan)),
      calls_(std::move(calls)),
      marks_(std::move(marks)),
      each_block_(each_block),
      starts_{0},
      progress_(memory.stages().size()) {
  for (const std::int64_t size : plan_->sizes) starts_.push_back(starts_.back() + size);
}

void PipelineRun::run(const StageAction& action, Turn&) {
  Stage& stage = memory_.stages()[action.stage];
  ActionMarks& marks = marks_->at(action.stage, action.kind, action.micro_batch);
  marks.clear();
  if (action.kind == Kind::forward) {
    forward(action, stage, marks);
  } else {
    backward(action, stage, marks);
  }
}

/// Makes the stage's work wait for what the neighbour `sender` has for this micro-batch, and brings it here.
void PipelineRun::receive(const StageAction& action, std::size_t sender, StageLink& link, std::byte* to,
                          const std::byte* from, std::size_t item_bytes) {
  const Event* const sent = marks_->at(sender, action.kind, action.micro_batch).end();
  Stream* const work = devices_.work(action.device);
  if (link.stream == nullptr) {  // one memory space
    if (sent != nullptr) work->wait(*sent);
    return;
  }
  const auto items = static_cast<std::size_t>(end(action.micro_batch) - begin(action.micro_batch));
  if (sent != nullptr) link.stream->wait(*sent);
  if (item_bytes > 0) link.stream->copy(to, from, items * item_bytes);
  link.stream->record(*link.arrived);
  if (work != nullptr) {
    work->wait(*link.arrived);
  } else {
    devices_.await(*link.arrived);
  }
}

BlockCall PipelineRun::call(const StageAction& action, std::size_t block, const Stage& stage) {
  const std::size_t k = block - stage.begin;
  const StageSlot& place = stage.places[stage.place_of(action.micro_batch)];
  BlockCall call{.block = block,
                 .device = action.device,
                 .micro_batch = action.micro_batch,
                 .begin = begin(action.micro_batch),
                 .end = end(action.micro_batch),
                 .memory = &memory_.block(block),
                 .output = place.outputs[k],
                 .saved = place.saved[k]};
  if (k > 0) {
    call.input = place.outputs[k - 1];
  } else if (action.stage > 0) {
    const Stage& before = memory_.stages()[action.stage - 1];
    call.input = memory_.boundaries()[action.stage - 1].input[before.place_of(action.micro_batch)];
  }
  if (Stream* const work = devices_.work(action.device)) {
    call.stream = work->native();
    call.loss_sum = stage.loss;
  }
  progress_[action.stage].block = block;
  return call;
}

void PipelineRun::forward(const StageAction& action, Stage& stage, ActionMarks& marks) {
  AsyncDevice* const maker = devices_.opened(action.device);
  Stream* const work = devices_.work(action.device);
  if (action.stage > 0) {
    StageBoundary& boundary = memory_.boundaries()[action.stage - 1];
    const std::size_t place = memory_.stages()[action.stage - 1].place_of(action.micro_batch);
    receive(action, action.stage - 1, boundary.forward, boundary.input[place], boundary.output[place],
            boundary.item_bytes);
  }
  if (!std::exchange(progress_[action.stage].cleared, true)) {  // by the device itself, on its own core
    for (std::size_t b = stage.begin; b < stage.end; ++b) {
      devices_.zero(action.device, memory_.block(b).sums, memory_.bytes(b).parameters);
    }
    if (work != nullptr) work->zero(stage.loss, sizeof(double));
  }
  marks.mark(maker, work);
  for (std::size_t b = stage.begin; b < stage.end; ++b) {
    const double loss = calls_.forward(call(action, b, stage));
    if (action.stage + 1 == memory_.stages().size()) loss_ += loss;
    if (each_block_ || b + 1 == stage.end) marks.mark(maker, work);
  }
}

void PipelineRun::backward(const StageAction& action, Stage& stage, ActionMarks& marks) {
  AsyncDevice* const maker = devices_.opened(action.device);
  Stream* const work = devices_.work(action.device);
  std::byte* gradient = nullptr;  // of the block's output
  if (action.stage + 1 < memory_.stages().size()) {
    StageBoundary& boundary = memory_.boundaries()[action.stage];
    const std::size_t place = stage.place_of(action.micro_batch);
    gradient = boundary.output_gradient[place];
    receive(action, action.stage + 1, boundary.backward, gradient, boundary.input_gradient[place], boundary.item_bytes);
  }
  marks.mark(maker, work);
  for (std::size_t b = stage.end; b-- > stage.begin;) {
    BlockCall one = call(action, b, stage);
    one.output_gradient = gradient;
    if (b > stage.begin) {
      one.input_gradient = stage.scratch[b % 2];
    } else if (action.stage > 0) {
      const Stage& before = memory_.stages()[action.stage - 1];
      one.input_gradient = memory_.boundaries()[action.stage - 1].input_gradient[before.place_of(action.micro_batch)];
    }
    calls_.backward(one);
    gradient = one.input_gradient;
    if (each_block_ || b == stage.begin) marks.mark(maker, work);
  }
}

void PipelineRun::prepare_commit(double scale, DType dtype) {
  scale_ = scale;
  dtype_ = dtype;
  const auto last = static_cast<std::int64_t>(plan_->sizes.size()) - 1;
  for (std::size_t s = 0; s < memory_.stages().size(); ++s) {
    const Stage& stage = memory_.stages()[s];
    std::vector<ReductionSegment> segments;
    if (devices_.work(stage.device) != nullptr) {
      const Event* const end = marks_->at(s, Kind::backward, last).end();
      if (end != nullptr) static_cast<void>(end->done());  // throws if the device has failed
    } else {
      for (std::size_t b = stage.begin; b < stage.end; ++b) {
        const BlockMemory& block = memory_.block(b);
        segments.push_back({{block.sums}, block.gradients, memory_.bytes(b).parameters / size_of(dtype), dtype, scale});
      }
    }
    sums_.push_back(std::make_unique<BlockReduction>(std::move(segments)));
  }
}

void PipelineRun::commit(std::size_t index) {
  const Stage& stage = memory_.stages()[index];
  Stream* const work = devices_.work(stage.device);
  if (work == nullptr) {
    sums_[index]->work();
    return;
  }
  for (std::size_t b = stage.begin; b < stage.end; ++b) {
    const BlockMemory& block = memory_.block(b);
    const std::size_t count = memory_.bytes(b).parameters / size_of(dtype_);
    const void* const sums = block.sums;
    if (count == 0) continue;
    work->reduce({.inputs = {&sums, 1}, .output = block.gradients, .count = count, .dtype = dtype_, .scale = scale_});
  }
  if (index + 1 == memory_.stages().size()) work->copy(marks_->loss->data(), stage.loss, sizeof(double));
  work->record(*marks_->over[index]);
}

}  // namespace paceline::internal
