// SPDX-License-Identifier: Apache-2.0
//
// What this machine's driver and GPU really do with parts of a GPU (green contexts), where documentation is silent or
// contradicts itself. No dependency but the toolkit:
//
//   nvcc -std=c++20 -arch=native tests/gpu/probe.cu -o probe && ./probe
//
// Prints one JSON object, with the version of nccl.h where the compiler finds one. Every answer is measured: which SMs
// a partition's kernels ran on is read from %smid.
#include <cuda.h>
#include <cuda_runtime.h>
#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorName(error));
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) throw Failure(std::string(what) + ": driver error " + std::to_string(result));
}

template <class F>
F entry(const char* name, unsigned int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result), name);
  if (function == nullptr) throw Failure(std::string(name) + ": this driver has none");
  return reinterpret_cast<F>(function);
}

struct Driver {
  decltype(&cuDeviceGetDevResource) device_resource =
      entry<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource", 12040);
  decltype(&cuDevSmResourceSplitByCount) split =
      entry<decltype(&cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount", 12040);
  decltype(&cuDevResourceGenerateDesc) describe =
      entry<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc", 12040);
  decltype(&cuGreenCtxCreate) create = entry<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate", 12040);
  decltype(&cuGreenCtxDestroy) destroy = entry<decltype(&cuGreenCtxDestroy)>("cuGreenCtxDestroy", 12040);
  decltype(&cuGreenCtxGetDevResource) context_resource =
      entry<decltype(&cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040);
  decltype(&cuGreenCtxStreamCreate) make_stream =
      entry<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", 12050);
};

/// Writes the SM of every block, and holds it for a while, so that all SMs in reach are used.
__global__ void note_sms(unsigned int* sms, unsigned long long nanoseconds) {
  unsigned int sm = 0;
  unsigned long long begin = 0;
  unsigned long long now = 0;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
  if (threadIdx.x == 0) sms[blockIdx.x] = sm;
}

__global__ void add_one(int* value) { ++*value; }

/// A part of the GPU and a stream on it.
struct Partition {
  CUgreenCtx context = nullptr;
  cudaStream_t stream = nullptr;
  unsigned int sm_count = 0;
};

Partition make_partition(const Driver& driver, CUdevice device, std::vector<CUdevResource> groups) {
  Partition partition;
  CUdevResourceDesc description = nullptr;
  check(driver.describe(&description, groups.data(), static_cast<unsigned int>(groups.size())), "describing groups");
  check(driver.create(&partition.context, description, device, CU_GREEN_CTX_DEFAULT_STREAM), "making a green context");
  CUdevResource got{};
  check(driver.context_resource(partition.context, &got, CU_DEV_RESOURCE_TYPE_SM), "asking a green context");
  partition.sm_count = got.sm.smCount;
  CUstream stream = nullptr;
  check(driver.make_stream(&stream, partition.context, CU_STREAM_NON_BLOCKING, 0), "making its stream");
  partition.stream = stream;
  return partition;
}

void destroy(const Driver& driver, Partition& partition) {
  check(cudaStreamDestroy(partition.stream), "destroying a stream");
  check(driver.destroy(partition.context), "destroying a green context");
}

/// Memory of the device, zeroed, which the host reads by copies. Managed memory would be moved to and fro instead.
template <class T>
class Numbers {
 public:
  explicit Numbers(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, count * sizeof(T)), "allocating");
    check(cudaMemset(data_, 0, count * sizeof(T)), "writing");
    check(cudaDeviceSynchronize(), "running");  // the streams that come next do not wait for the default stream
  }
  ~Numbers() { cudaFree(data_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::vector<T> read(cudaStream_t stream) const {
    std::vector<T> result(count_);
    check(cudaMemcpyAsync(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost, stream), "reading");
    check(cudaStreamSynchronize(stream), "running");
    return result;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

std::set<unsigned int> sms_of(cudaStream_t stream) {
  constexpr int kBlocks = 4096;
  const Numbers<unsigned int> sms(kBlocks);
  note_sms<<<kBlocks, 32, 0, stream>>>(sms.data(), 20'000);
  check(cudaGetLastError(), "launching");
  const std::vector<unsigned int> seen = sms.read(stream);
  return {seen.begin(), seen.end()};
}

/// Milliseconds of a kernel of `blocks` blocks on each of `streams`, all at once.
float milliseconds_once(const std::vector<cudaStream_t>& streams, int blocks) {
  const Numbers<unsigned int> sms(static_cast<std::size_t>(blocks));
  std::vector<cudaEvent_t> events(2 * streams.size());
  for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "making an event");
  for (std::size_t i = 0; i < streams.size(); ++i) {
    check(cudaEventRecord(events[2 * i], streams[i]), "recording");
    note_sms<<<blocks, 1024, 0, streams[i]>>>(sms.data(), 200'000);
    check(cudaGetLastError(), "launching");
    check(cudaEventRecord(events[2 * i + 1], streams[i]), "recording");
  }
  float longest = 0.0F;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    check(cudaEventSynchronize(events[2 * i + 1]), "running");
    float time = 0.0F;
    check(cudaEventElapsedTime(&time, events[0], events[2 * i + 1]), "reading a time");
    longest = std::max(longest, time);
  }
  for (cudaEvent_t event : events) check(cudaEventDestroy(event), "destroying an event");
  return longest;
}

/// The shortest of several runs: what disturbs one only makes it longer.
float milliseconds(const std::vector<cudaStream_t>& streams, int blocks) {
  constexpr int kRounds = 7;
  float shortest = milliseconds_once(streams, blocks);
  for (int round = 1; round < kRounds; ++round) shortest = std::min(shortest, milliseconds_once(streams, blocks));
  return shortest;
}

/// Ping-pong of one counter between two partitions, ordered by events alone.
bool events_order(const Partition& a, const Partition& b) {
  constexpr int kRounds = 1000;
  const Numbers<int> value(1);
  cudaEvent_t passed = nullptr;
  check(cudaEventCreateWithFlags(&passed, cudaEventDisableTiming), "making an event");
  for (int round = 0; round < kRounds; ++round) {
    const Partition& from = round % 2 == 0 ? a : b;
    const Partition& to = round % 2 == 0 ? b : a;
    add_one<<<1, 1, 0, from.stream>>>(value.data());
    check(cudaEventRecord(passed, from.stream), "recording");
    check(cudaStreamWaitEvent(to.stream, passed, 0), "waiting");
  }
  check(cudaDeviceSynchronize(), "running");
  const bool right = value.read(a.stream).front() == kRounds;
  check(cudaEventDestroy(passed), "destroying an event");
  return right;
}

bool pool_works(const Partition& partition, int device) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  cudaMemPool_t pool = nullptr;
  check(cudaMemPoolCreate(&pool, &properties), "making a pool");
  void* data = nullptr;
  check(cudaMallocFromPoolAsync(&data, 1 << 20, pool, partition.stream), "allocating from a pool");
  check(cudaMemsetAsync(data, 1, 1 << 20, partition.stream), "writing");
  check(cudaFreeAsync(data, partition.stream), "freeing to a pool");
  check(cudaStreamSynchronize(partition.stream), "running");
  check(cudaMemPoolDestroy(pool), "destroying a pool");
  return true;
}

bool disjoint(const std::set<unsigned int>& a, const std::set<unsigned int>& b) {
  return std::none_of(a.begin(), a.end(), [&](unsigned int sm) { return b.contains(sm); });
}

/// Throws Failure when the driver's parts of a GPU are not what paceline takes them for. What was measured is printed
/// before.
void probe_partitions(int ordinal) {
  const Driver driver;
  const CUdevice device = ordinal;
  CUdevResource whole{};
  check(driver.device_resource(device, &whole, CU_DEV_RESOURCE_TYPE_SM), "asking the device");
  unsigned int count = 0;
  check(driver.split(nullptr, &count, &whole, nullptr, 0, 1), "counting groups");
  std::vector<CUdevResource> groups(count);
  CUdevResource rest{};
  check(driver.split(groups.data(), &count, &whole, &rest, 0, 1), "splitting");
  groups.resize(count);
  std::printf(", \"sms\": %u, \"groups\": %u, \"sms_of_a_group\": %u, \"sms_left\": %u", whole.sm.smCount, count,
              groups.empty() ? 0 : groups[0].sm.smCount, rest.type == CU_DEV_RESOURCE_TYPE_SM ? rest.sm.smCount : 0);
  if (count < 4) return;
  // Three quarters and one: several groups of one split in one descriptor.
  const std::size_t cut = count * 3 / 4;
  const auto middle = groups.begin() + static_cast<std::ptrdiff_t>(cut);
  Partition large = make_partition(driver, device, {groups.begin(), middle});
  Partition small = make_partition(driver, device, {middle, groups.end()});
  const std::set<unsigned int> large_sms = sms_of(large.stream);
  const std::set<unsigned int> small_sms = sms_of(small.stream);
  const bool apart = disjoint(large_sms, small_sms);
  std::printf(", \"large\": {\"sms\": %u, \"seen\": %zu}, \"small\": {\"sms\": %u, \"seen\": %zu}, \"disjoint\": %s",
              large.sm_count, large_sms.size(), small.sm_count, small_sms.size(), apart ? "true" : "false");
  // Twice as many full blocks as SMs of the small one take the same time alone and beside the other, if both run at
  // once.
  const int blocks = static_cast<int>(4 * small.sm_count);
  const float large_alone = milliseconds({large.stream}, blocks);
  const float small_alone = milliseconds({small.stream}, blocks);
  const float together = milliseconds({large.stream, small.stream}, blocks);
  // One after the other they take the sum; half of the shorter one is left for launches and for chance.
  const bool overlap = together < std::max(large_alone, small_alone) + 0.5F * std::min(large_alone, small_alone);
  std::printf(", \"large_alone_ms\": %.3f, \"small_alone_ms\": %.3f, \"together_ms\": %.3f, \"overlap\": %s",
              large_alone, small_alone, together, overlap ? "true" : "false");
  const bool ordered = events_order(large, small);
  std::printf(", \"events_order\": %s", ordered ? "true" : "false");
  std::printf(", \"pool_on_a_partition\": %s", pool_works(small, ordinal) ? "true" : "false");
  destroy(driver, small);
  destroy(driver, large);
  if (!apart) throw Failure("two partitions ran kernels on the same SMs");
  if (!overlap) throw Failure("the kernels of two partitions ran one after the other");
  if (!ordered) throw Failure("events do not order the work of two partitions");
}

}  // namespace

int main() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("{\"available\": false, \"why\": \"%s\"}\n", cudaGetErrorName(error));
    return 0;
  }
  int driver_version = 0;
  int runtime_version = 0;
  cudaDeviceProp properties{};
  int status = EXIT_SUCCESS;
  std::printf("{\"available\": true");
  try {
    check(cudaDriverGetVersion(&driver_version), "asking for the driver's version");
    check(cudaRuntimeGetVersion(&runtime_version), "asking for the runtime's version");
    check(cudaGetDeviceProperties(&properties, 0), "asking for properties");
    check(cudaSetDevice(0), "choosing the device");
    check(cudaFree(nullptr), "making its context");
    std::printf(", \"gpu\": \"%s\", \"driver\": %d, \"runtime\": %d", properties.name, driver_version, runtime_version);
#ifdef NCCL_VERSION_CODE
    std::printf(", \"nccl_header\": %d", NCCL_VERSION_CODE);
#else
    std::printf(", \"nccl_header\": null");  // none in the compiler's reach
#endif
    probe_partitions(0);
  } catch (const Failure& failure) {
    std::printf(", \"failed\": \"%s\"", failure.what());
    status = EXIT_FAILURE;
  }
  std::printf("}\n");
  return status;
}
