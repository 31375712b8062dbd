// SPDX-License-Identifier: Apache-2.0
//
// The all-reduce of two host devices beside its roofline, in which the same two threads only read and write both
// buffers. The two take turns, so that both have the same conditions. The time is that of the all-reduce. `of_roofline`
// is the median over all turns of the roofline's time divided by the all-reduce's time.
//   benchmark_all_reduce --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <paceline/comm/communicator.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {
namespace {

constexpr std::array<const char*, 2> kDevices{"host:0", "host:1"};

/// One cache line.
struct Line {
  std::array<char, 64> bytes;
};

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void exchange(Line* __restrict first, Line* __restrict second, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i) {
    const Line was = first[i];
    first[i] = second[i];
    second[i] = was;
  }
}

/// The workers exchange the two buffers in parts. Each worker takes the next part, so that a busy core does not delay
/// the rest.
class ExchangeTask final : public GroupTask {
 public:
  ExchangeTask(float* first, float* second, std::size_t count)
      : first_(reinterpret_cast<Line*>(first)),
        second_(reinterpret_cast<Line*>(second)),
        lines_(count * sizeof(float) / sizeof(Line)) {}

  void run(DeviceId) noexcept override {
    constexpr std::size_t part = 1024;  // lines
    for (std::size_t begin = next_.fetch_add(part); begin < lines_; begin = next_.fetch_add(part)) {
      exchange(first_ + begin, second_ + begin, std::min(part, lines_ - begin));
    }
  }

 private:
  Line* first_;
  Line* second_;
  std::size_t lines_;
  std::atomic<std::size_t> next_{0};
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <class Call>
double seconds(Call call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void all_reduce(benchmark::State& state) {
  DeviceGroup group(std::vector<std::string>(kDevices.begin(), kDevices.end()));
  Communicator communicator(group);
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::size_t count = bytes / sizeof(float);
  std::vector<float> first(count, 0.0F);
  std::vector<float> second(count, 0.0F);
  const std::array<BufferView, 2> views{BufferView{.data = first.data(), .count = count},
                                        BufferView{.data = second.data(), .count = count}};
  const auto reduce = [&] { communicator.all_reduce(views); };
  const auto exchange = [&] { group.run(std::make_shared<ExchangeTask>(first.data(), second.data(), count)); };
  reduce();
  exchange();
  std::vector<double> ratios;
  std::vector<double> times;
  bool reduces_first = false;
  for ([[maybe_unused]] auto _ : state) {
    // Alternate the order, because each finds in the caches what the other has left there.
    reduces_first = !reduces_first;
    double reduced = reduces_first ? seconds(reduce) : 0.0;
    const double exchanged = seconds(exchange);
    if (!reduces_first) reduced = seconds(reduce);
    ratios.push_back(exchanged / reduced);
    times.push_back(reduced);
    state.SetIterationTime(reduced);
  }
  state.counters["of_roofline"] = median(ratios);
  state.counters["GB/s"] = 4e-9 * static_cast<double>(bytes) / median(times);  // both buffers are read and written
}
BENCHMARK(all_reduce)->ArgName("bytes")->RangeMultiplier(4)->Range(1 << 10, 256 << 20)->UseManualTime();

}  // namespace
}  // namespace paceline
