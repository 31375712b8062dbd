// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/error.hpp>
#include <paceline/per_device.hpp>

#include "comm/memory_spaces.hpp"
#include "comm/space_collectives.hpp"
#include "engine/hang.hpp"
#include "engine/queues/bucket_sums.hpp"
#include "engine/queues/enqueued_buckets.hpp"
#include "engine/queues/step_times.hpp"

namespace paceline {

/// The streams of a group by device (queues) and by memory space, and what a step enqueues on them.
struct DeviceQueues::State {
  static constexpr std::size_t kHome = internal::kHome;

  struct Queue {
    std::size_t space = 0;
    AsyncDevice* device = nullptr;  // null on the host
    Stream* stream = nullptr;       // null on the host; the home stream if there is only one device
    std::unique_ptr<Stream> own_stream{};
    std::unique_ptr<Stream> source{};
    std::unique_ptr<Event> delivered{};
    std::vector<BufferView> parts{};  // what it has sealed, for the collectives
    bool has_delivered = false;
    bool entered = false;
  };

  struct Space {
    // The whole GPU, even if its devices are parts, because work for all of them must not run on one part only. Home's
    // for the host.
    AsyncDevice* maker = nullptr;
    std::shared_ptr<Stream> copies{};                // null at home without collectives
    std::unique_ptr<Event> arrived{};                // the parameters
    std::vector<std::unique_ptr<Event>> arrivals{};  // each bucket of them
    std::unique_ptr<Event> relayed{};                // what other spaces pull of the bucket that is under way
    std::unique_ptr<Event> summed{};                 // by the collectives
    bool takes_part = true;                          // in this step
  };

  State(const DeviceGroup& group, const DeviceQueueOptions& the_options);

  [[nodiscard]] std::size_t gpu_space_count() { return memory.spaces().size(); }
  [[nodiscard]] bool on_host(std::size_t space) { return space == gpu_space_count(); }
  [[nodiscard]] PerDevice<std::size_t> space_of_device() const {
    PerDevice<std::size_t> spaces_of;
    for (const auto& [id, queue] : queues) spaces_of.add(id, queue.space);
    return spaces_of;
  }
  [[nodiscard]] AsyncDevice& home_device() const { return *spaces[kHome].maker; }

  void find_spaces(const DeviceGroup& group);
  /// Orders steps on this stream of the caller from now on; null: on one of our own.
  void use(NativeStream native);
  void open(Queue& queue);
  static void open(Space& space, std::shared_ptr<Stream> copies);
  /// Connects several GPUs.
  void connect();
  /// With collectives these sum what the GPUs have, and the result is one more source, the last one.
  void prepare_sums();
  void begin(std::vector<bool> takes_part);
  void expect(std::span<const BufferView> the_outputs, double scale);
  void seal(DeviceId device, std::size_t k, const BufferView& bucket, NativeEvent written = nullptr);
  /// Copies home's parameters to the other spaces, once they are ready. If there is a thread for it, that thread
  /// enqueues the copies.
  void distribute(std::span<const SpaceCopy> copies);
  void enqueue(std::span<const SpaceCopy> copies);
  /// Enqueues the copies of one bucket, to one space after the other.
  void enqueue_bucket(std::span<const SpaceCopy> copies);
  /// The stream that brings parameters to the space, for one call. @throws Cancelled if nobody waits for them any more
  [[nodiscard]] Stream& copies_to(std::size_t space);
  /// Waits until so many buckets of parameters are enqueued, and remembers a hang. @throws what has failed, or Timeout
  void await_enqueued(std::size_t buckets);
  /// What the space's devices have delivered as their k-th part.
  [[nodiscard]] std::vector<const void*> parts_in(std::size_t space, std::size_t k) const;
  /// Sums the parts of all GPUs' devices at home, by the collectives.
  void collect();
  void await(const Event& event) const { hung.await(event, options.timeout); }
  /// Waits until nobody else uses the streams of copies and sums, and remembers a hang. @throws Timeout
  void settle(std::optional<std::chrono::nanoseconds> timeout = std::nullopt);
  /// The same, but only remembers a hang.
  void settle_or_hang() noexcept;
  void check() const { hung.check("step"); }
  void drain(AsyncDevice* device, Stream* stream) const { hung.drain(device, stream, options.timeout); }

  DeviceQueueOptions options;
  internal::MemorySpaces memory;
  bool one_whole_gpu = false;  // the only device, which computes on the home stream
  PerDevice<Queue> queues;
  std::vector<Space> spaces;  // home's first, the host's last
  std::string transport;
  GpuLinks links;
  bool relays = true;                                       // of parameters between GPUs
  std::shared_ptr<internal::SpaceCollectives> collectives;  // null: copies are used
  std::optional<internal::BucketSums> sums;
  internal::EnqueuedBuckets enqueued;  // in this step
  std::vector<BufferView> outputs;
  std::unique_ptr<Stream> home_stream;
  bool owns_home_stream = false;
  std::unique_ptr<Event> ready;
  std::shared_ptr<internal::Evidence> evidence = std::make_shared<internal::Evidence>();  // of all steps
  std::shared_ptr<internal::SpareEvents> spare_events = std::make_shared<internal::SpareEvents>();
  std::shared_ptr<internal::RecordedTimes> step;
  internal::Hang hung;  // shared with the steps' times
  bool left = false;    // a drain did not end
};

}  // namespace paceline
