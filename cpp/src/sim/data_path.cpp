// SPDX-License-Identifier: Apache-2.0
#include <paceline/sim/data_path.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "refuse.hpp"
#include "sim/stream_machine.hpp"

namespace paceline::sim {
namespace {

using Event = StreamMachine::Event;
using Events = std::vector<Event>;

constexpr std::size_t kHome = 0;
constexpr std::size_t kRounds = 4;  // in which a sharded optimizer updates a range
constexpr int kPathSteps = 4;       // those before the last one lead to the steady state: the first gets no parameters

/// One way of several steps. Each GPU has a stream that computes, one that moves what it pulls, and home one for the
/// caller's work.
class Way {
 public:
  explicit Way(const DataPathOptions& options)
      : o_(options),
        n_(options.gpus),
        buckets_(static_cast<std::size_t>(std::ceil(options.parameters * options.bytes_each / options.bucket_bytes))),
        bytes_(options.parameters * options.bytes_each / static_cast<double>(buckets_)),
        machine_(2 * options.gpus, options.gpus, options.links) {}
  virtual ~Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;

  /// `threads`: of one process, which start the operators of so many GPUs.
  [[nodiscard]] DataPathOutcome run(std::string name, std::size_t threads) {
    std::vector<Event> begins;
    std::vector<Events> arrived;  // per GPU and bucket, of this step's parameters; empty: they are there
    for (int step = 0; step < kPathSteps; ++step) {
      begins.push_back(machine_.record(compute(kHome)));
      std::vector<Events> ready(n_);
      for (std::size_t g = 0; g < n_; ++g) ready[g] = pass(g, arrived.empty() ? Events{} : arrived[g]);
      arrived = exchange(ready);
    }
    machine_.run();
    DataPathOutcome outcome{.way = std::move(name)};
    // Threads start operators ahead of the GPUs, so the slower of the two sets the pace.
    outcome.step_seconds = std::max(machine_.time_of(begins[kPathSteps - 1]) - machine_.time_of(begins[kPathSteps - 2]),
                                    o_.operators * static_cast<double>(threads) / launch_rate(threads));
    outcome.exposed_seconds = outcome.step_seconds - o_.forward_seconds - o_.backward_seconds - o_.update_seconds;
    return outcome;
  }

 protected:
  [[nodiscard]] std::size_t compute(std::size_t gpu) const { return gpu; }
  [[nodiscard]] std::size_t moving(std::size_t gpu) const { return n_ + gpu; }

  /// A kernel that reads and writes so many bytes in all.
  void kernel(std::size_t stream, double bytes) {
    machine_.compute(stream, o_.launch_seconds + bytes / o_.memory_bytes_per_second);
  }

  /// What happens between the backward of a step and the next forward. `ready`: per GPU and bucket, when its gradient
  /// is there. Returns when the next parameters are, likewise.
  virtual std::vector<Events> exchange(const std::vector<Events>& ready) = 0;

  /// Each GPU from `first` on sums a slice of a bucket, which it pulls from the others in turn, the next one first.
  void sum_slices(const std::vector<Events>& ready, std::size_t bucket, std::size_t first) {
    const double slice = bytes_ / static_cast<double>(n_ - first);
    for (std::size_t g = first; g < n_; ++g) {
      for (const Events& each : ready) machine_.wait(moving(g), each[bucket]);
      for (std::size_t k = 1; k < n_; ++k) machine_.copy(moving(g), (g + k) % n_, g, slice);
      kernel(moving(g), static_cast<double>(n_ + 1) * slice);
    }
  }

  DataPathOptions o_;
  std::size_t n_;
  std::size_t buckets_;
  double bytes_;  // of a bucket
  StreamMachine machine_;

 private:
  /// Forward and backward. Bucket 0 is the first in forward, and the last in backward.
  Events pass(std::size_t gpu, const Events& arrived) {
    Events ready(buckets_);
    const auto count = static_cast<double>(buckets_);
    for (std::size_t k = 0; k < buckets_; ++k) {
      if (!arrived.empty()) machine_.wait(compute(gpu), arrived[k]);
      machine_.compute(compute(gpu), o_.forward_seconds / count);
    }
    for (std::size_t k = buckets_; k-- > 0;) {
      machine_.compute(compute(gpu), o_.backward_seconds / count);
      ready[k] = machine_.record(compute(gpu));
    }
    return ready;
  }
};

class Serial final : public Way {
 public:
  using Way::Way;

 private:
  std::vector<Events> exchange(const std::vector<Events>& ready) override {
    const double all = o_.parameters * o_.bytes_each;
    for (std::size_t g = 0; g < n_; ++g) {
      machine_.wait(moving(g), ready[g].front());
      kernel(moving(g), 2.0 * all);
      const Event flat = machine_.record(moving(g));
      if (g != kHome) machine_.wait(moving(kHome), flat);
    }
    for (std::size_t g = 1; g < n_; ++g) machine_.copy(moving(kHome), g, kHome, all);
    kernel(moving(kHome), static_cast<double>(n_ + 1) * all);
    machine_.compute(moving(kHome), o_.update_seconds);
    const Event updated = machine_.record(moving(kHome));
    std::vector<Events> arrived{Events(buckets_, updated)};
    for (std::size_t g = 1; g < n_; ++g) {
      machine_.wait(moving(g), updated);
      for (std::size_t k = 0; k < o_.pieces; ++k) {
        machine_.copy(moving(g), kHome, g, all / static_cast<double>(o_.pieces));
      }
      arrived.emplace_back(buckets_, machine_.record(moving(g)));
    }
    return arrived;
  }
};

class Buckets : public Way {
 public:
  using Way::Way;

 protected:
  /// Runs the update between home's last sum and the first parameters that are sent.
  virtual void update() { machine_.compute(moving(kHome), o_.update_seconds); }

 private:
  std::vector<Events> exchange(const std::vector<Events>& ready) override {
    Events pulled;  // by home; a sum is overwritten when home has pulled the one before the last
    for (std::size_t k = buckets_; k-- > 0;) {
      for (std::size_t g = 1; g < n_ && pulled.size() >= 2; ++g) {
        machine_.wait(moving(g), pulled[pulled.size() - 2]);
      }
      sum_at_home(ready, k);
      pulled.push_back(machine_.record(moving(kHome)));
    }
    update();
    const Event updated = machine_.record(moving(kHome));
    std::vector<Events> arrived{Events(buckets_, updated)};
    for (std::size_t g = 1; g < n_; ++g) {
      machine_.wait(moving(g), updated);
      arrived.emplace_back();
    }
    for (std::size_t k = 0; k < buckets_; ++k) {
      for (std::size_t g = 1; g < n_; ++g) {
        if (g > 1) machine_.wait(moving(g), arrived[g - 1].back());
        machine_.copy(moving(g), g - 1, g, bytes_);
        arrived[g].push_back(machine_.record(moving(g)));
      }
    }
    return arrived;
  }

  /// All but home sum a slice each, and home pulls it. Of two GPUs home sums.
  void sum_at_home(const std::vector<Events>& ready, std::size_t bucket) {
    if (n_ == 2) {
      for (const Events& each : ready) machine_.wait(moving(kHome), each[bucket]);
      machine_.copy(moving(kHome), 1, kHome, bytes_);
      return kernel(moving(kHome), 3.0 * bytes_);
    }
    sum_slices(ready, bucket, 1);
    for (std::size_t g = 1; g < n_; ++g) {
      machine_.wait(moving(kHome), machine_.record(moving(g)));
      machine_.copy(moving(kHome), g, kHome, bytes_ / static_cast<double>(n_ - 1));
    }
  }
};

class Ranges final : public Buckets {
 public:
  using Buckets::Buckets;

 private:
  void update() override {
    // In rounds, so that what goes out of home and what comes into it overlap.
    const auto parts = static_cast<double>(n_ * kRounds);
    const double range = o_.parameters * o_.bytes_each / parts;
    const double seconds = o_.update_seconds / parts;
    const Event begun = machine_.record(moving(kHome));
    for (std::size_t g = 1; g < n_; ++g) machine_.wait(moving(g), begun);
    for (std::size_t round = 0; round < kRounds; ++round) {
      machine_.compute(moving(kHome), seconds);
      for (std::size_t g = 1; g < n_; ++g) {
        machine_.copy(moving(g), kHome, g, 2.0 * range);
        machine_.compute(moving(g), seconds);
        machine_.wait(moving(kHome), machine_.record(moving(g)));
        machine_.copy(moving(kHome), g, kHome, range);
      }
    }
  }
};

class Sharded final : public Way {
 public:
  using Way::Way;

 private:
  std::vector<Events> exchange(const std::vector<Events>& ready) override {
    const double slice = bytes_ / static_cast<double>(n_);
    for (std::size_t k = buckets_; k-- > 0;) sum_slices(ready, k, kHome);
    // Forward needs bucket 0 first, so its slices are updated and pulled first.
    std::vector<Events> arrived(n_);
    for (std::size_t k = 0; k < buckets_; ++k) {
      Events updated;
      for (std::size_t g = 0; g < n_; ++g) {
        machine_.compute(moving(g), o_.update_seconds / static_cast<double>(buckets_ * n_));
        updated.push_back(machine_.record(moving(g)));
      }
      for (std::size_t g = 0; g < n_; ++g) {
        for (std::size_t j = 1; j < n_; ++j) {
          machine_.wait(moving(g), updated[(g + j) % n_]);
          machine_.copy(moving(g), (g + j) % n_, g, slice);
        }
        arrived[g].push_back(machine_.record(moving(g)));
      }
    }
    return arrived;
  }
};

class Ring final : public Way {
 public:
  using Way::Way;

 private:
  std::vector<Events> exchange(const std::vector<Events>& ready) override {
    const double slice = bytes_ / static_cast<double>(n_);
    for (std::size_t k = buckets_; k-- > 0;) {
      Events last;
      for (std::size_t g = 0; g < n_; ++g) {
        for (const Events& each : ready) machine_.wait(moving(g), each[k]);
      }
      for (std::size_t turn = 0; turn < 2 * (n_ - 1); ++turn) {
        Events now;
        for (std::size_t g = 0; g < n_; ++g) {
          const std::size_t left = (g + n_ - 1) % n_;
          if (!last.empty()) machine_.wait(moving(g), last[left]);
          machine_.copy(moving(g), left, g, slice);
          now.push_back(machine_.record(moving(g)));
        }
        last = std::move(now);
      }
    }
    std::vector<Events> arrived;
    for (std::size_t g = 0; g < n_; ++g) {
      machine_.compute(moving(g), o_.update_seconds);
      arrived.emplace_back(buckets_, machine_.record(moving(g)));
    }
    return arrived;
  }
};

void check(const DataPathOptions& options) {
  if (options.gpus < 2 || options.gpus > 64) refuse("simulate: {} GPUs; give 2 to 64.", options.gpus);
  const std::pair<const char*, double> positive[] = {{"parameters", options.parameters},
                                                     {"bytes of a parameter", options.bytes_each},
                                                     {"forward_seconds", options.forward_seconds},
                                                     {"backward_seconds", options.backward_seconds},
                                                     {"bucket_bytes", options.bucket_bytes},
                                                     {"memory_bytes_per_second", options.memory_bytes_per_second},
                                                     {"bandwidth of a link", options.links.pair_bytes_per_second},
                                                     {"bandwidth of a port", options.links.port_bytes_per_second}};
  for (const auto& [name, value] : positive) {
    if (!(value > 0.0) || !std::isfinite(value))
      refuse("simulate: {} is {}; it must be positive and finite.", name, value);
  }
  if (!(options.update_seconds >= 0.0) || !(options.links.latency_seconds >= 0.0) || !(options.launch_seconds >= 0.0) ||
      !(options.links.host_bytes_per_second >= 0.0) || options.pieces == 0 || !(options.operators >= 0.0) ||
      !std::isfinite(options.operators)) {
    refuse("simulate: times, latencies, operators and the host's bandwidth must not be negative, and pieces not 0.");
  }
  constexpr double kMostBuckets = 1000.0;
  if (options.parameters * options.bytes_each / options.bucket_bytes > kMostBuckets) {
    refuse("simulate: {:.0f} buckets; give larger ones, so that there are at most {:.0f}.",
           options.parameters * options.bytes_each / options.bucket_bytes, kMostBuckets);
  }
}

}  // namespace

LinkSpeeds link_speeds(const std::string& name) {
  // Bytes per second that copies reach in one direction, not the links' own rates. NVLink 4: 450 GB/s a port, of which
  // a ring all-reduce of NCCL reaches about 370; the same part is assumed of NVLink 5. PCIe 4 and 5 x16: 32 and 64 GB/s
  // a port, of which about four fifths are assumed; switches are assumed not to be crowded. Host: each byte goes over
  // PCIe 4 twice, and all GPUs share the memory of the host. Latencies are assumptions.
  static const std::map<std::string, LinkSpeeds> known{
      {"nvlink4", {370e9, 370e9, 0.0, 3e-6}}, {"nvlink5", {740e9, 740e9, 0.0, 3e-6}},
      {"pcie4", {25e9, 25e9, 0.0, 8e-6}},     {"pcie5", {50e9, 50e9, 0.0, 8e-6}},
      {"host", {12e9, 12e9, 60e9, 20e-6}},
  };
  const auto found = known.find(name);
  if (found == known.end())
    refuse("simulate: there is no link '{}'; use host, nvlink4, nvlink5, pcie4 or pcie5.", name);
  return found->second;
}

double launch_rate(std::size_t threads) {
  if (threads == 0) refuse("simulate: operators that no thread starts; give at least one thread.");
  // The host of one H200, PyTorch 2.11, small operators (benchmarks/python/launch_scaling.py).
  constexpr std::array<double, 4> kMeasured{55e3, 63e3, 92e3, 73e3};  // by 1, 2, 4 and 8 threads
  const double place = std::log2(static_cast<double>(threads));
  if (place >= static_cast<double>(kMeasured.size() - 1)) return kMeasured.back();
  const auto before = static_cast<std::size_t>(place);
  return std::lerp(kMeasured[before], kMeasured[before + 1], place - static_cast<double>(before));
}

std::vector<DataPathOutcome> simulate_data_path(const DataPathOptions& options) {
  check(options);
  const std::size_t n = options.gpus;
  return {Serial(options).run("serial", n), Buckets(options).run("buckets", n), Ranges(options).run("ranges", n),
          Sharded(options).run("sharded", n), Ring(options).run("ring", 1)};
}

}  // namespace paceline::sim
