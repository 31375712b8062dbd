// SPDX-License-Identifier: Apache-2.0
#include "engine/pipeline/pipeline_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <paceline/error.hpp>

namespace paceline::internal {
namespace {

constexpr std::size_t kPartAlignment = 256;  // what cudaMalloc promises

std::size_t aligned(std::size_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

/// Deals out memory from its beginning. Without a base it only counts.
class Dealer {
 public:
  explicit Dealer(std::byte* base) : base_(base) {}
  std::byte* take(std::size_t bytes) {
    std::byte* const at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += aligned(bytes);
    return at;
  }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace

PipelineMemory::PipelineMemory(StageDevices& devices, std::vector<BlockBytes> blocks, std::vector<std::int64_t> limits,
                               const plan::StagePlan& plan)
    : devices_(devices), blocks_(std::move(blocks)) {
  limits.resize(devices_.ids().size(), 0);
  limits_ = {devices_.ids(), std::move(limits)};
  for (std::size_t s = 0; s < plan.cuts.size(); ++s) {
    const std::size_t end = s + 1 < plan.cuts.size() ? plan.cuts[s + 1] : blocks_.size();
    const DeviceId device = devices_.at(plan.order[s]);
    for (std::size_t b = plan.cuts[s]; b < end; ++b) {
      owned_.push_back(make(b, device));
      devices_.zero(device, owned_.back().buffer->data(), owned_.back().buffer->bytes());
    }
  }
}

BlockMemory PipelineMemory::make(std::size_t block, DeviceId device) const {
  const BlockBytes& sizes = blocks_[block];
  BlockMemory memory{.device = device};
  const auto deal = [&](std::byte* base) {
    Dealer dealer(base);
    memory.parameters = dealer.take(sizes.parameters);
    memory.state = dealer.take(sizes.state);
    memory.gradients = dealer.take(sizes.parameters);
    memory.sums = dealer.take(sizes.parameters);
    return dealer.used();
  };
  memory.buffer = devices_.allocate(device, std::max(deal(nullptr), kPartAlignment));
  deal(static_cast<std::byte*>(memory.buffer->data()));
  return memory;
}

void PipelineMemory::move(std::size_t block, DeviceId to) {
  BlockMemory& now = owned_[block];
  const DeviceId from = std::exchange(now.device, to);
  if (devices_.space(from) == devices_.space(to)) return;
  now.device = from;
  BlockMemory there = make(block, to);
  // The sums are worth nothing between steps. They lie at the end.
  const auto bytes = static_cast<std::size_t>(now.sums - static_cast<std::byte*>(now.buffer->data()));
  Stream& stream = devices_.work(to) != nullptr ? *devices_.work(to) : *devices_.work(from);
  if (bytes > 0) stream.copy(there.buffer->data(), now.buffer->data(), bytes);
  devices_.drain(devices_.opened(devices_.work(to) != nullptr ? to : from), &stream);
  now = std::move(there);
}

bool PipelineMemory::fits(const plan::StagePlan& plan, const std::vector<Slots>& slots) const {
  if (stages_.size() != plan.cuts.size() || plan.sizes.front() > items_) return false;
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    const bool same = stages_[s].begin == plan.cuts[s] && stages_[s].device == devices_.at(plan.order[s]);
    if (!same || slots[s].count > stages_[s].places.size()) return false;
  }
  return true;
}

bool PipelineMemory::arrange(const plan::StagePlan& plan) {
  std::vector<Slots> slots;
  for (std::size_t s = 0; s < plan.cuts.size(); ++s) slots.push_back(slots_of(plan.schedule, s));
  const bool ready = fits(plan, slots);
  if (!ready) {
    devices_.drain();
    boundaries_.clear();
    stages_.clear();
    std::vector<Stage> stages(plan.cuts.size());
    for (std::size_t s = 0; s < stages.size(); ++s) {
      stages[s].device = devices_.at(plan.order[s]);
      stages[s].begin = plan.cuts[s];
      stages[s].end = s + 1 < stages.size() ? plan.cuts[s + 1] : blocks_.size();
      stages[s].places.resize(slots[s].count);
    }
    for (Stage& stage : stages) {
      for (std::size_t b = stage.begin; b < stage.end; ++b) move(b, stage.device);
    }
    stages_.swap(stages);
    boundaries_.resize(stages_.size() - 1);
    try {
      const std::int64_t items = plan.sizes.front();
      for (std::size_t s = 0; s < stages_.size(); ++s) {
        stages_[s].bytes = static_cast<std::int64_t>(lay_out(s, items, nullptr));
        for (std::size_t b = stages_[s].begin; b < stages_[s].end; ++b) {
          stages_[s].bytes += static_cast<std::int64_t>(owned_[b].buffer->bytes());
        }
      }
      check_limits(stages_);
      for (std::size_t s = 0; s < stages_.size(); ++s) {
        Stage& stage = stages_[s];
        stage.buffer = devices_.allocate(stage.device, std::max(lay_out(s, items, nullptr), kPartAlignment));
        lay_out(s, items, static_cast<std::byte*>(stage.buffer->data()));
      }
      for (std::size_t s = 0; s < boundaries_.size(); ++s) connect(s);
      devices_.drain();  // memory comes in the order of its device's stream, and links copy into it on others
      items_ = items;
    } catch (...) {
      boundaries_.clear();
      stages_.clear();
      throw;
    }
  }
  for (std::size_t s = 0; s < stages_.size(); ++s) stages_[s].slots = std::move(slots[s]);
  return !ready;
}

void PipelineMemory::check_limits(const std::vector<Stage>& stages) const {
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = stages[s];
    const std::int64_t limit = limits_[stage.device];
    if (limit <= 0 || stage.bytes <= limit) continue;
    const std::string& name = devices_.name(stage.device);
    throw OutOfMemory(fmt::format("pipeline: {} may hold {} bytes, and stage {} (blocks {} to {}) takes {} with {} "
                                  "micro-batches in flight. Raise memory_limits, or use smaller batches.",
                                  name, limit, s, stage.begin, stage.end - 1, stage.bytes, stage.places.size()),
                      name);
  }
}

/// Places all that stage `index` holds beside its blocks. @return how many bytes that is.
std::size_t PipelineMemory::lay_out(std::size_t index, std::int64_t items, std::byte* base) {
  const auto count = static_cast<std::size_t>(items);
  Stage& stage = stages_[index];
  StageBoundary* const before = index > 0 ? &boundaries_[index - 1] : nullptr;
  StageBoundary* const behind = index + 1 < stages_.size() ? &boundaries_[index] : nullptr;
  Dealer dealer(base);
  const auto apart = [&](std::size_t other) {
    return devices_.space(stage.device) != devices_.space(stages_[other].device);
  };
  for (StageSlot& place : stage.places) {
    place = {};
    for (std::size_t b = stage.begin; b < stage.end; ++b) {
      place.saved.push_back(dealer.take(count * blocks_[b].saved));
      place.outputs.push_back(dealer.take(count * blocks_[b].output));
    }
  }
  std::size_t widest = 0;
  for (std::size_t b = stage.begin; b + 1 < stage.end; ++b) widest = std::max(widest, blocks_[b].output);
  for (std::byte*& scratch : stage.scratch) scratch = dealer.take(count * widest);
  stage.loss = reinterpret_cast<double*>(dealer.take(sizeof(double)));
  if (before != nullptr) {  // laid out after the stage before it
    const std::size_t places = stages_[index - 1].places.size();
    before->input = before->output;
    before->input_gradient.assign(places, nullptr);
    for (std::size_t k = 0; k < places; ++k) {
      if (apart(index - 1)) before->input[k] = dealer.take(count * before->item_bytes);
      before->input_gradient[k] = dealer.take(count * before->item_bytes);
      if (!apart(index - 1)) before->output_gradient[k] = before->input_gradient[k];
    }
  }
  if (behind != nullptr) {
    behind->item_bytes = blocks_[stage.end - 1].output;
    behind->output.clear();
    behind->output_gradient.assign(stage.places.size(), nullptr);
    for (std::size_t k = 0; k < stage.places.size(); ++k) {
      behind->output.push_back(stage.places[k].outputs.back());
      if (apart(index + 1)) behind->output_gradient[k] = dealer.take(count * behind->item_bytes);
    }
  }
  return dealer.used();
}

void PipelineMemory::connect(std::size_t index) {
  const DeviceId before = stages_[index].device;
  const DeviceId behind = stages_[index + 1].device;
  if (devices_.space(before) == devices_.space(behind)) return;
  const auto open = [&](StageLink& link, DeviceId sender, DeviceId receiver) {
    AsyncDevice& maker = *devices_.opened(devices_.opened(receiver) != nullptr ? receiver : sender);
    link.stream = maker.make_stream();
    link.arrived = maker.make_event(false);
  };
  open(boundaries_[index].forward, before, behind);
  open(boundaries_[index].backward, behind, before);
}

}  // namespace paceline::internal
