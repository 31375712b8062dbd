// SPDX-License-Identifier: Apache-2.0
//
// What tests of steps that nobody waits for share: a program that sums, its kernels, and kernels that write.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/engine/step_loop.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device_group.hpp>

#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "nccl_host.hpp"
#include "twins.hpp"

namespace paceline {

inline constexpr std::int64_t kBatch = 12;
inline double bring_seconds = 0.0;  // what comes before a batch can be brought to another GPU

struct Add {
  const double* batch;
  std::int64_t begin;
  std::int64_t end;
  double* sum;
};

inline void add_kernel(Add) {}
inline void fill_kernel(double*, double) {}
inline void slow_kernel(int) {}

inline void boot(std::uint64_t seed, int gpus, int switch_size = fake::Settings{}.switch_size) {
  fake::boot({.seed = seed, .device_count = gpus, .switch_size = switch_size});
  fake::set_twins();
  fake::twin(&add_kernel, [](const fake::Launch&, const Add& add) {
    fake::reads(add.batch + add.begin, static_cast<std::size_t>(add.end - add.begin) * sizeof(double));
    fake::writes(add.sum, sizeof(double));
    fake::takes(1e-3 * static_cast<double>(add.end - add.begin));
    for (std::int64_t k = add.begin; k < add.end; ++k) *add.sum += add.batch[k];
  });
  fake::twin(&fill_kernel, [](const fake::Launch&, double* batch, double value) {
    fake::writes(batch, kBatch * sizeof(double));
    std::fill(batch, batch + kBatch, value);
  });
  fake::twin(&slow_kernel, [](const fake::Launch&, int) { fake::takes(bring_seconds); });
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  fake::boot_nccl();
}

template <class K, class... A>
void launch(K* kernel, Stream& stream, A... values) {
  void* arguments[] = {&values...};
  ASSERT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(1), dim3(1), arguments, 0, stream.native()),
            cudaSuccess);
}

struct Write {
  float* to;
  std::size_t count;
  std::uint32_t seed;
};

inline void write_kernel(Write) {}

/// Values whose sum depends on the order of the additions.
inline void write(const Write& one) {
  std::minstd_rand random(one.seed);
  for (std::size_t i = 0; i < one.count; ++i) {
    one.to[i] = static_cast<float>(random() % 2000003) * (random() % 2 == 0 ? 1e-3F : -1e3F);
  }
}

inline void boot_with_writes(std::uint64_t seed, int gpus, int switch_size = fake::Settings{}.switch_size) {
  boot(seed, gpus, switch_size);
  fake::twin(&write_kernel, [](const fake::Launch&, const Write& one) {
    fake::writes(one.to, one.count * sizeof(float));
    write(one);
  });
}

struct Counted {
  Counted() { ++alive; }
  ~Counted() { --alive; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  static inline std::atomic<int> alive{0};
};

/// Sums a batch that lies at home and changes from step to step. Nobody waits for anything.
class Summing final : public StepProgram {
 public:
  explicit Summing(const DeviceGroup& group, std::int64_t run_ahead = 1, Transport transport = Transport::nccl)
      : queues(group, {.run_ahead = run_ahead, .collectives = {.transport = transport, .warm_up_bytes = 64}}) {
    const auto at_home = [&](DeviceId d) { return queues.space_of(d) == queues.home_space(); };
    home_index_ = group.device(*std::ranges::find_if(group.ids(), at_home)).index;
    AsyncDevice& home = queues.maker(queues.home_space());
    batch_ = home.allocate(kBatch * sizeof(double), queues.home_stream());
    for (const DeviceId d : queues.devices()) {
      Part& part = parts_.emplace_back();
      const std::size_t space = queues.space_of(d);
      AsyncDevice& maker = queues.maker(space);
      const auto make = [&](std::size_t bytes) {
        return queues.on_host(space) ? maker.allocate_pinned(bytes) : maker.allocate(bytes, *queues.stream(d));
      };
      part.sum = make(sizeof(double));
      if (space == queues.home_space()) continue;
      part.batch = make(kBatch * sizeof(double));
      part.brought = home.make_event(false);
      if (queues.on_host(space)) continue;
      const std::unique_ptr<Event> there = maker.make_event(false);
      queues.stream(d)->record(*there);
      queues.source_stream(d)->wait(*there);
    }
  }
  ~Summing() override {
    queues.drain();
    for (const DeviceId d : queues.devices()) {
      if (queues.stream(d) == nullptr) parts_[d.number()] = {};
    }
  }

  /// The next step is about kBatch times `value`; its sum goes to `output`, at home.
  void begin(double value, double* output) {
    ASSERT_EQ(cudaSetDevice(home_index_), cudaSuccess);
    launch(&fill_kernel, queues.home_stream(), static_cast<double*>(batch_->data()), value);
    times_ = queues.begin_step(parameters);
    const BufferView outputs[] = {{output, 1, DType::float64}};
    queues.expect(outputs, 1.0);
    for (Part& part : parts_) part.ran = false;
  }

  const Event* slot(DeviceId d) override { return queues.slot(d); }
  [[nodiscard]] std::chrono::nanoseconds patience() const override { return queues.patience(); }
  void give_up(const Event& event) override { queues.give_up(event); }

  bool run(const MicroBatch& mb) override {
    Part& part = parts_[mb.device.number()];
    Stream* const stream = queues.stream(mb.device);
    const bool entered = queues.enter(mb.device, at_once);
    if (entered && stream != nullptr) stream->zero(part.sum->data(), sizeof(double));
    if (entered && stream == nullptr) *static_cast<double*>(part.sum->data()) = 0.0;
    queues.begin_run(mb.device, mb.continues);
    if (entered && part.batch != nullptr) bring(part, mb.device, stream);
    if (!mb.continues) queues.restart_run(mb.device);
    for (const std::size_t bucket : needs) queues.need(mb.device, bucket);
    const Buffer& batch = part.batch != nullptr ? *part.batch : *batch_;
    const Add add{static_cast<const double*>(batch.data()), mb.begin, mb.end, static_cast<double*>(part.sum->data())};
    if (stream != nullptr) {
      launch(&add_kernel, *stream, add);
    } else {
      for (std::int64_t k = add.begin; k < add.end; ++k) *add.sum += add.batch[k];
    }
    queues.end_run(mb.device);
    part.ran = true;
    return false;
  }

  void finish(DeviceId d) override {
    if (parts_[d.number()].ran) queues.deliver(d, {{parts_[d.number()].sum->data(), 1, DType::float64}});
  }

  std::vector<ReductionSegment> reduction() override {
    queues.reduce();
    queues.end_step();
    return {};
  }

  void stamp(std::vector<ClaimRecord>& claims) const override { times_->stamp(claims); }
  [[nodiscard]] bool settled() const override { return times_->settled(); }
  void settle() const override { times_->wait(); }

  Counted counted;  // first, that is, the last of it to go
  DeviceQueues queues;
  std::vector<SpaceCopy> parameters{};
  bool at_once = true;               // whether a device waits for all of them before it begins
  std::vector<std::size_t> needs{};  // the buckets that each run waits for

 private:
  struct Part {
    std::unique_ptr<Buffer> sum;
    std::unique_ptr<Buffer> batch;  // where home's is out of reach
    std::unique_ptr<Event> brought;
    bool ran = false;
  };

  void bring(Part& part, DeviceId device, Stream* stream) {
    Stream& source = *queues.source_stream(device);
    if (bring_seconds > 0.0) {
      int own = 0;
      ASSERT_EQ(cudaGetDevice(&own), cudaSuccess);
      ASSERT_EQ(cudaSetDevice(home_index_), cudaSuccess);
      launch(&slow_kernel, source, 0);
      ASSERT_EQ(cudaSetDevice(own), cudaSuccess);
    }
    source.copy(part.batch->data(), batch_->data(), kBatch * sizeof(double));
    source.record(*part.brought);
    if (stream != nullptr) {
      stream->wait(*part.brought);
    } else {
      wait_for(*part.brought);
    }
  }

  int home_index_ = 0;
  std::vector<Part> parts_;
  std::unique_ptr<Buffer> batch_;
  std::shared_ptr<const StepTimes> times_;
};

}  // namespace paceline
