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

#include "engine/gpu_collectives.hpp"
#include "engine/step_times.hpp"

namespace paceline {

/// The streams of a group by device (lanes) and by memory space, and what a step enqueues on them.
struct DeviceQueues::State {
  struct Lane {
    std::size_t space = 0;
    std::unique_ptr<AsyncDevice> device;  // null on the host
    Stream* stream = nullptr;             // home's where one device is all there is
    std::unique_ptr<Stream> own_stream;
    std::unique_ptr<Stream> source;
    std::unique_ptr<Event> delivered;
    std::vector<BufferView> parts;
    bool entered = false;
    bool has_delivered = false;
  };

  struct Space {
    // The GPU as a whole, also where its devices are parts: what is done for all of them shall not have to do with
    // one's share of it. Null on the host.
    std::shared_ptr<AsyncDevice> device;
    std::shared_ptr<Stream> copies;  // null at home, unless it takes part in collectives
    std::unique_ptr<Event> arrived;  // the parameters
    std::unique_ptr<Event> summed;
    std::vector<std::unique_ptr<Buffer>> sums;    // of its lanes' parts; none on the host
    std::vector<std::unique_ptr<Buffer>> landed;  // at home, one for each part that comes
  };

  DeviceQueueOptions options;
  std::size_t run_ahead = 1;
  bool one_whole_gpu = false;  // is all there is: then it computes on the home stream
  std::size_t home = 0;
  std::vector<Lane> lanes;
  std::vector<Space> spaces;
  std::vector<Device> gpus;  // of each space; nothing is read of the host's
  std::string transport;
  std::shared_ptr<internal::GpuCollectives> collectives;  // null: by copies
  std::unique_ptr<Stream> home_stream;
  bool owns_home_stream = false;
  std::unique_ptr<Event> ready;
  internal::RecordedTimes::Shared times;  // of all steps
  std::shared_ptr<internal::RecordedTimes> step;
  std::atomic<bool> hung{false};
  bool left = false;  // a drain that did not come to its end

  [[nodiscard]] AsyncDevice& home_device() const { return *spaces[home].device; }
  [[nodiscard]] AsyncDevice& maker(const Space& space) const { return space.device ? *space.device : home_device(); }
  [[nodiscard]] bool on_host(const Space& space) const { return space.device == nullptr; }
  [[nodiscard]] const Event& arrival(const Lane& lane) const {
    return lane.space == home ? *ready : *spaces[lane.space].arrived;
  }

  // Set up once, in this order.
  void find_spaces(const DeviceGroup& group);
  /// From now on steps are ordered on this stream of the caller's; null: on one of our own.
  void use(void* native);
  void open(Lane& lane);
  void open(Space& space);
  /// Where the group has several GPUs, after their spaces' streams were made.
  void connect();

  // In each step.
  /// Home's parameters to everybody else, once they are ready.
  void distribute(std::span<const SpaceCopy> copies);
  /// The sums of all GPUs' devices, at home.
  void collect(std::span<const BufferView> outputs, std::vector<std::vector<const void*>>& inputs);
  void bring_home(Space& space, std::size_t index, std::vector<std::vector<const void*>>& inputs);
  /// Waits, and remembers a hang: whatever comes after it would wait as long again.
  void await(const Event& event);
  /// Waits until the stream has nothing left. A device that fails here has nothing left either.
  void drain(AsyncDevice* device, Stream* stream);

 private:
  [[nodiscard]] std::vector<const Lane*> gather(Space& space, std::size_t index);
};

}  // namespace paceline
