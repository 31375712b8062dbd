// SPDX-License-Identifier: Apache-2.0
//
// The speed of the summing kernels beside that of the device's own copy: bytes read and written per second, for k
// buffers into one. Prints one JSON object.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>

#include "cuda_backend.hpp"

namespace {

using namespace paceline;

constexpr std::size_t kBytes = std::size_t{256} << 20;  // of each buffer: beyond any L2 cache
constexpr int kRounds = 15;

/// Seconds of the shortest of several runs, by the device's own events. The first warms up.
double seconds(AsyncDevice& device, Stream& stream, const std::function<void()>& work) {
  double shortest = std::numeric_limits<double>::infinity();
  const auto begin = device.make_event(true);
  const auto end = device.make_event(true);
  for (int round = 0; round <= kRounds; ++round) {
    stream.record(*begin);
    work();
    stream.record(*end);
    wait_for(*end);
    if (round > 0) shortest = std::min(shortest, end->seconds_since(*begin));
  }
  return shortest;
}

void measure() {
  const auto device = CudaBackend().open(find_device("cuda:0"));
  const auto stream = device->make_stream();
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<const void*> inputs;
  for (int k = 0; k < 5; ++k) {
    buffers.push_back(device->allocate(kBytes, *stream));
    stream->zero(buffers.back()->data(), kBytes);
  }
  void* const output = buffers.back()->data();
  const double copy =
      2.0 * kBytes / seconds(*device, *stream, [&] { stream->copy(output, buffers[0]->data(), kBytes); });
  std::printf("{\"available\": true, \"copy_gigabytes_per_second\": %.1f, \"sums\": [", copy / 1e9);
  const char* separator = "";
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
    for (const std::size_t count : {std::size_t{2}, std::size_t{3}, std::size_t{4}}) {
      inputs.clear();
      for (std::size_t k = 0; k < count; ++k) inputs.push_back(buffers[k]->data());
      const double time =
          seconds(*device, *stream, [&] { stream->reduce({inputs, output, kBytes / size_of(dtype), dtype, 0.5}); });
      const double rate = static_cast<double>(count + 1) * kBytes / time;
      std::printf("%s{\"dtype\": \"%s\", \"inputs\": %zu, \"gigabytes_per_second\": %.1f, \"of_copy\": %.3f}",
                  separator, name_of(dtype), count, rate / 1e9, rate / copy);
      separator = ", ";
    }
  }
  std::printf("]}\n");
}

}  // namespace

int main() {
  const CudaBackend backend;
  if (backend.devices().empty()) {
    std::printf("{\"available\": false, \"why\": \"%s\"}\n", backend.why_none().c_str());
    return 0;
  }
  try {
    measure();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_sum_bandwidth: %s\n", error.what());
    return 1;
  }
  return 0;
}
