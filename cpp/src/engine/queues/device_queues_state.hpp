// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/backend.hpp>

#include "comm/memory_spaces.hpp"
#include "comm/space_collectives.hpp"
#include "engine/queues/step_times.hpp"

namespace paceline {

/// The streams of a group by device (queues) and by memory space, and what a step enqueues on them.
struct DeviceQueues::State {
  static constexpr std::size_t kHome = 0;

  struct Queue {
    std::size_t space = 0;
    AsyncDevice* device = nullptr;  // null on the host
    Stream* stream = nullptr;       // null on the host; the home stream if there is only one device
    std::unique_ptr<Stream> own_stream;
    std::unique_ptr<Stream> source;
    std::unique_ptr<Event> delivered;
    std::vector<BufferView> parts;
    bool entered = false;
    bool has_delivered = false;
  };

  struct Space {
    // The whole GPU, even if its devices are parts, because work for all of them must not run on one part only. Home's
    // for the host.
    AsyncDevice* maker = nullptr;
    Stream* copies = nullptr;        // null at home without collectives
    std::unique_ptr<Event> arrived;  // the parameters
    std::unique_ptr<Event> summed;
    bool takes_part = true;  // in this step
    std::vector<std::unique_ptr<Buffer>> sums;    // one for each part that its queues deliver; none on the host
    std::vector<std::unique_ptr<Buffer>> landed;  // at home, one for each part that arrives
  };

  DeviceQueueOptions options;
  std::size_t run_ahead = 1;
  internal::MemorySpaces memory;
  bool one_whole_gpu = false;  // the only device, which computes on the home stream
  std::vector<Queue> queues;
  std::vector<Space> spaces;  // home's first, the host's last
  std::unique_ptr<Stream> host_copies;
  std::string transport;
  std::shared_ptr<internal::SpaceCollectives> collectives;  // null: copies are used
  std::unique_ptr<Stream> home_stream;
  bool owns_home_stream = false;
  std::unique_ptr<Event> ready;
  internal::RecordedTimes::Shared times;  // of all steps
  std::shared_ptr<internal::RecordedTimes> step;
  std::atomic<bool> hung{false};
  bool left = false;  // a drain did not end

  explicit State(const DeviceGroup& group) : memory(group) {}
  [[nodiscard]] std::size_t gpu_spaces() { return memory.spaces().size(); }
  [[nodiscard]] bool on_host(std::size_t space) { return space == gpu_spaces(); }
  [[nodiscard]] AsyncDevice& home_device() const { return *spaces[kHome].maker; }
  [[nodiscard]] const Event& arrival(const Queue& queue) const {
    return queue.space == kHome ? *ready : *spaces[queue.space].arrived;
  }

  // Called once, in this order.
  void find_spaces(const DeviceGroup& group);
  /// Orders steps on this stream of the caller from now on; null: on one of our own.
  void use(void* native);
  void open(Queue& queue);
  void open(Space& space, Stream& copies);
  /// Connects several GPUs. Requires: the streams of their spaces.
  void connect();

  // In each step.
  /// Copies home's parameters to the other spaces, once they are ready.
  void distribute(std::span<const SpaceCopy> copies);
  /// Sums the parts of all GPUs' devices at home.
  void collect(std::span<const BufferView> outputs, std::vector<std::vector<const void*>>& inputs);
  void bring_home(Space& space, std::size_t index, std::vector<std::vector<const void*>>& inputs);
  /// Waits, and remembers a hang, because every later wait would take as long again.
  void await(const Event& event);
  /// Waits until the stream has no work left. A device that fails here has none left either.
  void drain(AsyncDevice* device, Stream* stream);

 private:
  [[nodiscard]] std::vector<const Queue*> gather(Space& space, std::size_t index);
};

}  // namespace paceline
