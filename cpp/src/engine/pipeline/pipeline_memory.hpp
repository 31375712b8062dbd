// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <paceline/device_id.hpp>
#include <paceline/per_device.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/dtype.hpp>

#include "engine/pipeline/slots.hpp"
#include "engine/pipeline/stage_devices.hpp"

namespace paceline::internal {

/// A block of the model in bytes; output and saved per item.
struct BlockBytes {
  std::size_t parameters = 0;
  std::size_t state = 0;
  std::size_t output = 0;
  std::size_t saved = 0;
};

/// What the library owns of a block, in the memory of its stage's device.
struct BlockMemory {
  DeviceId device{};
  std::byte* parameters = nullptr;
  std::byte* gradients = nullptr;  ///< of the last successful step
  std::byte* sums = nullptr;       ///< of the step that runs
  std::byte* state = nullptr;
  std::unique_ptr<Buffer> buffer{};
};

/// What a micro-batch in flight has at a stage: per block of the stage what it saves and its output.
struct StageSlot {
  std::vector<std::byte*> saved;
  std::vector<std::byte*> outputs;
};

/// How data crosses the boundary in one direction, if it has to be copied: on a stream of the receiver, or of the
/// sender if the receiver is a host device. The receiver's work waits for each copy, so links need no draining of their
/// own.
struct StageLink {
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Event> arrived;
};

/// The boundary behind a stage. For each micro-batch that the stage has in flight there is a place in every array. In
/// one memory space `input` is `output`, and `output_gradient` is `input_gradient`.
///
/// Who may write to a place when: the stage's next forward in this place comes after its backward of the micro-batch
/// that had the place, on one stream. That backward waited for the next stage's backward, and this for all copies. So
/// everything that used the place is done, and no more events are needed.
struct StageBoundary {
  std::vector<std::byte*> output;           ///< on the stage before the boundary
  std::vector<std::byte*> input;            ///< on the stage behind it
  std::vector<std::byte*> input_gradient;   ///< on the stage behind it, which writes it
  std::vector<std::byte*> output_gradient;  ///< on the stage before it
  std::size_t item_bytes = 0;
  StageLink forward;
  StageLink backward;
};

struct Stage {
  DeviceId device{};
  std::size_t begin = 0;  ///< its blocks are [begin, end)
  std::size_t end = 0;
  Slots slots;
  std::vector<StageSlot> places;
  std::array<std::byte*, 2> scratch{};  ///< gradients between its blocks, by turns
  double* loss = nullptr;               ///< on a GPU, for the last stage
  std::int64_t bytes = 0;               ///< all that its device holds
  std::unique_ptr<Buffer> buffer;

  [[nodiscard]] std::size_t place_of(std::int64_t micro_batch) const {
    return slots.of[static_cast<std::size_t>(micro_batch)];
  }
};

/// The memory of a pipeline: that of each block, and that of the micro-batches in flight at each stage. Not
/// thread-safe; workers only use what is arranged.
class PipelineMemory {
 public:
  /// `limits`: bytes per device; 0 or empty: none. Blocks are where `plan` puts them, and zero.
  /// @throws OutOfMemory naming the device.
  PipelineMemory(StageDevices& devices, std::vector<BlockBytes> blocks, std::vector<std::int64_t> limits,
                 const plan::StagePlan& plan);
  ~PipelineMemory() { devices_.drain(); }
  PipelineMemory(const PipelineMemory&) = delete;
  PipelineMemory& operator=(const PipelineMemory&) = delete;

  /// Makes everything ready for this plan. Blocks that go to another memory space are copied; then, and when memory is
  /// laid out anew, it waits until the devices have ended their work.
  /// @return whether the stages are others than before.
  /// @throws OutOfMemory naming the device; blocks may have moved then, and the next call arranges everything again.
  bool arrange(const plan::StagePlan& plan);

  [[nodiscard]] std::vector<Stage>& stages() noexcept { return stages_; }
  [[nodiscard]] const std::vector<Stage>& stages() const noexcept { return stages_; }
  /// Boundary s is between stages s and s + 1.
  [[nodiscard]] std::vector<StageBoundary>& boundaries() noexcept { return boundaries_; }
  [[nodiscard]] BlockMemory& block(std::size_t index) { return owned_[index]; }
  [[nodiscard]] const BlockBytes& bytes(std::size_t block) const { return blocks_[block]; }
  [[nodiscard]] StageDevices& devices() noexcept { return devices_; }

 private:
  [[nodiscard]] BlockMemory make(std::size_t block, DeviceId device) const;
  void move(std::size_t block, DeviceId to);
  [[nodiscard]] bool fits(const plan::StagePlan& plan, const std::vector<Slots>& slots) const;
  void check_limits(const std::vector<Stage>& stages) const;
  std::size_t lay_out(std::size_t stage, std::int64_t items, std::byte* base);
  void connect(std::size_t boundary);

  StageDevices& devices_;
  std::vector<BlockBytes> blocks_;
  PerDevice<std::int64_t> limits_;
  std::vector<BlockMemory> owned_;
  std::vector<Stage> stages_;
  std::vector<StageBoundary> boundaries_;
  std::int64_t items_ = 0;  // that a place has room for
};

}  // namespace paceline::internal
