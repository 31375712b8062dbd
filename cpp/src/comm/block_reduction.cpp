// SPDX-License-Identifier: Apache-2.0
#include "comm/block_reduction.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <paceline/error.hpp>

namespace paceline::internal {
namespace {

// One block's inputs and output together stay in a private L2 (1 MiB and more on current cores) for up to eight inputs.
constexpr std::size_t kBlockBytes = 64 * 1024;

template <class T>
void scale_block(void* data, std::size_t count, double factor) {
  T* values = static_cast<T*>(data);
  const T by = static_cast<T>(factor);
  for (std::size_t i = 0; i < count; ++i) values[i] *= by;
}

}  // namespace

BlockReduction::BlockReduction(std::vector<ReductionSegment> segments) : segments_(std::move(segments)), claims_(1, 0) {
  std::size_t claimed_bytes = 0;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    const DType dtype = segments_[s].dtype;
    if (segments_[s].scale != 1.0 && dtype != DType::float32 && dtype != DType::float64) {
      throw InvalidArgument(fmt::format(
          "BlockReduction: a scale of {} for {}; only float32 and float64 can be scaled. Scale what is added up.",
          segments_[s].scale, name_of(dtype)));
    }
    const std::size_t element = size_of(segments_[s].dtype);
    const std::size_t most = std::max<std::size_t>(kBlockBytes / element, 1);
    for (std::size_t begin = 0; begin < segments_[s].count; begin += most) {
      const std::size_t count = std::min(most, segments_[s].count - begin);
      blocks_.push_back({s, begin, count});
      claimed_bytes += count * element;
      if (claimed_bytes >= kBlockBytes) {  // small parameters share a claim
        claims_.push_back(blocks_.size());
        claimed_bytes = 0;
      }
    }
  }
  if (claims_.back() != blocks_.size()) claims_.push_back(blocks_.size());
}

bool BlockReduction::work() noexcept {
  const std::size_t total = claims_.size() - 1;
  std::vector<const void*> inputs;
  for (std::size_t c = next_.fetch_add(1, std::memory_order_relaxed); c < total;
       c = next_.fetch_add(1, std::memory_order_relaxed)) {
    for (std::size_t b = claims_[c]; b < claims_[c + 1]; ++b) {
      const Block& block = blocks_[b];
      const ReductionSegment& segment = segments_[block.segment];
      const std::size_t offset = block.begin * size_of(segment.dtype);
      inputs.clear();
      for (const void* input : segment.inputs) inputs.push_back(static_cast<const std::byte*>(input) + offset);
      void* output = static_cast<std::byte*>(segment.output) + offset;
      reduce_block(inputs, output, block.count, segment.dtype, ReduceOp::sum);
      if (segment.scale != 1.0) {
        if (segment.dtype == DType::float32) scale_block<float>(output, block.count, segment.scale);
        if (segment.dtype == DType::float64) scale_block<double>(output, block.count, segment.scale);
      }
    }
    done_.fetch_add(1, std::memory_order_acq_rel);
  }
  return done_.load(std::memory_order_acquire) == total;
}

}  // namespace paceline::internal
