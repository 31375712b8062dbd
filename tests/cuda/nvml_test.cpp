// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_health.hpp>
#include <paceline/runtime/gpu_facts.hpp>

#include "cuda_backend.hpp"
#include "fake_cuda.hpp"
#include "fake_nvml.hpp"
#include "interrupts.hpp"
#include "nvml.hpp"
#include "nvml_deadline.hpp"
#include "nvml_library.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

using cuda::GpuAddress;
using cuda::NvmlLibrary;
using fake_nvml::Gpu;
using std::chrono::milliseconds;

const GpuAddress kGpu{.name = "cuda:0", .pci_bus_id = "0000:01:00.0"};
const GpuAddress kOther{.name = "cuda:1", .pci_bus_id = "0000:02:00.0"};

/// The state of the fake at `path`, as new.
fake_nvml::State& fresh(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto get = reinterpret_cast<fake_nvml::State* (*)()>(dlsym(library, "fake_nvml_state"));
  fake_nvml::State& state = *get();
  state.gpus = {{kGpu.pci_bus_id, Gpu{}}, {kOther.pci_bus_id, Gpu{}}};
  state.status.clear();
  state.driver_version = "580.126.09";
  state.delay = milliseconds(0);
  state.starts = 0;
  state.overlapped = false;
  state.hangs = false;
  return state;
}

DeviceHealth health(const NvmlLibrary& library, std::span<const GpuAddress> others = {}) {
  return cuda::read_nvml(library, kGpu, others).value();
}

std::optional<double> seconds_under(const DeviceHealth& health, ClockLimit limit) {
  const auto& time = health.limited_for[static_cast<std::size_t>(limit)];
  if (!time) return std::nullopt;
  return std::chrono::duration<double>(*time).count();
}

TEST(NvmlLibrary, OpensThePathItIsGivenAndSaysWhatItFound) {
  const fake_nvml::State& state = fresh(FAKE_NVML);
  const NvmlLibrary library(FAKE_NVML);
  EXPECT_TRUE(library.available()) << library.why_none();
  EXPECT_EQ(library.path(), FAKE_NVML);
  EXPECT_EQ(library.version(), "13.580.126.09");
  EXPECT_EQ(library.driver_version(), "580.126.09");
  EXPECT_EQ(state.starts, 1);
}

TEST(NvmlLibrary, StaysOpenWhenItsUserGoes) {
  const fake_nvml::State& state = fresh(FAKE_NVML);
  {
    const NvmlLibrary library(FAKE_NVML);
  }
  EXPECT_EQ(state.stops, 0);
}

TEST(NvmlLibrary, SaysWhyItIsNotThere) {
  const NvmlLibrary nowhere("/nowhere/libnvidia-ml.so.1");
  EXPECT_FALSE(nowhere.available());
  EXPECT_EQ(nowhere.why_none().find("PACELINE_NVML_LIBRARY names a library that cannot be loaded: /nowhere/"), 0U)
      << nowhere.why_none();
  EXPECT_EQ(cuda::read_nvml(nowhere, kGpu, {}), std::nullopt);

  fresh(FAKE_NVML_FOREIGN);
  const NvmlLibrary foreign(FAKE_NVML_FOREIGN);
  EXPECT_NE(foreign.why_none().find("has no nvmlInit"), std::string::npos) << foreign.why_none();
  EXPECT_EQ(cuda::read_nvml(foreign, kGpu, {}), std::nullopt);

  fresh(FAKE_NVML).status["nvmlInit_v2"] = 9;
  const NvmlLibrary broken(FAKE_NVML);
  EXPECT_NE(broken.why_none().find("Driver Not Loaded (error 9)"), std::string::npos) << broken.why_none();
  EXPECT_EQ(broken.path(), FAKE_NVML) << "the path helps to find out which copy it is";
}

TEST(NvmlLibrary, PrefersTheCopyThatIsInTheProcess) {
  EXPECT_EXIT(
      {
        fresh(FAKE_NVML_SONAME);  // called libnvidia-ml.so.1, as the driver's
        const NvmlLibrary library(FAKE_NVML);
        std::exit(library.available() && library.path() == FAKE_NVML_SONAME ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Nvml, ReadsWhatThereIs) {
  fake_nvml::State& state = fresh(FAKE_NVML);
  Gpu& gpu = state.gpus[kGpu.pci_bus_id];
  gpu.clock_mhz = 1200;
  gpu.limits = 0x4 | 0x20;
  gpu.fields = {{74, {.value = 6'100'000'000}}, {76, {.value = 5}}, {269, {.value = 1'000'000'000}}, {270, {}}};
  gpu.temperature = 83;
  gpu.power_milliwatts = 349500;
  gpu.power_limit_milliwatts = 350000;
  gpu.links = {1, 1, 0, 1};
  gpu.peers = {{kOther.pci_bus_id, 0}};
  const NvmlLibrary library(FAKE_NVML);
  const DeviceHealth found = health(library, std::vector{kOther, GpuAddress{"cuda:2", "0000:99:00.0"}});
  EXPECT_EQ(found.clock_hz, 1.2e9);
  EXPECT_EQ(found.max_clock_hz, 1.98e9);
  ASSERT_TRUE(found.limits.has_value());
  EXPECT_EQ(found.limits->to_ullong(), 0x24ULL);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), 6.1);
  EXPECT_EQ(seconds_under(found, ClockLimit::software_thermal), 1.0);
  EXPECT_EQ(seconds_under(found, ClockLimit::hardware_thermal), 0.0);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_brake), std::nullopt);
  EXPECT_EQ(found.temperature_celsius, 83.0);
  EXPECT_DOUBLE_EQ(found.power_watts.value(), 349.5);
  EXPECT_DOUBLE_EQ(found.power_limit_watts.value(), 350.0);
  EXPECT_EQ(found.nvlinks_up, 3);
  ASSERT_EQ(found.peers.size(), 1U) << "a GPU that NVML does not know is left out";
  EXPECT_EQ(found.peers[0].device, "cuda:1");
  EXPECT_EQ(found.peers[0].over_nvlink, true);
  EXPECT_EQ(cuda::read_nvml(library, {"cuda:7", "0000:77:00.0"}, {}), std::nullopt);
}

TEST(Nvml, LeavesUnknownWhatFails) {
  fake_nvml::State& state = fresh(FAKE_NVML);
  const NvmlLibrary library(FAKE_NVML);
  for (const char* const name :
       {"nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus"}) {
    state.status[name] = 15;  // the GPU is lost
  }
  const DeviceHealth found = health(library, std::vector{kOther});
  EXPECT_EQ(found.max_clock_hz, 1.98e9) << "what still answers is told";
  EXPECT_FALSE(found.clock_hz || found.limits || found.temperature_celsius || found.power_watts ||
               found.power_limit_watts || found.other_processes || found.nvlinks_up);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), std::nullopt);
  EXPECT_EQ(found.peers.at(0).reads, std::nullopt);
  EXPECT_TRUE(causes_of(found, found).empty());
}

TEST(Nvml, WorksWithTheNamesOfOldDrivers) {
  fake_nvml::State& state = fresh(FAKE_NVML_OLD);
  state.driver_version = "450.51";
  Gpu& gpu = state.gpus[kGpu.pci_bus_id];
  gpu.limits = 0x40 | 0x8;
  gpu.compute = {{static_cast<std::uint32_t>(getpid()), 1U << 30}, {1234567, 3ULL << 30}};
  const NvmlLibrary library(FAKE_NVML_OLD);
  ASSERT_TRUE(library.available()) << library.why_none();
  const DeviceHealth found = health(library);
  EXPECT_EQ(found.limits->to_ullong(), 0x48ULL);
  EXPECT_EQ(found.other_processes.value().count, 1);
  EXPECT_EQ(found.other_processes->memory_bytes, 3ULL << 30);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), std::nullopt);
}

TEST(Nvml, MakesDoWithALibraryThatLacksNearlyEverything) {
  fresh(FAKE_NVML_BARE);
  const NvmlLibrary library(FAKE_NVML_BARE);
  ASSERT_TRUE(library.available()) << library.why_none();
  EXPECT_EQ(library.version(), "");
  const DeviceHealth found = health(library, std::vector{kOther});
  EXPECT_FALSE(found.clock_hz || found.limits || found.other_processes || found.nvlinks_up || found.power_watts);
  EXPECT_EQ(found.peers.at(0).over_nvlink, std::nullopt);
}

TEST(Nvml, AsksEachDriverForTheFieldsUnderItsOwnNumbers) {
  using Fields = std::array<std::uint32_t, 3>;
  EXPECT_EQ(cuda::thermal_fields("535.161.08"), (Fields{75, 0, 0}));
  EXPECT_EQ(cuda::thermal_fields("570.86.15"), (Fields{75, 0, 0}));
  EXPECT_EQ(cuda::thermal_fields("575.51.03"), (Fields{251, 252, 253}));
  EXPECT_EQ(cuda::thermal_fields("580.65.06"), (Fields{251, 252, 253}));
  EXPECT_EQ(cuda::thermal_fields("580.82.07"), (Fields{269, 270, 271}));
  EXPECT_EQ(cuda::thermal_fields("590.44"), (Fields{269, 270, 271}));
  for (const char* const odd : {"", "580", "x.y", "."}) EXPECT_EQ(cuda::thermal_fields(odd), (Fields{0, 0, 0})) << odd;
}

TEST(Nvml, IgnoresFieldsThatFailOrHaveAnotherType) {
  fake_nvml::State& state = fresh(FAKE_NVML);
  state.gpus[kGpu.pci_bus_id].fields = {{74, {.value = 7, .type = 1}},
                                        {76, {.value = 7, .status = 3}},
                                        {269, {.value = ~std::uint64_t{0}}},
                                        {270, {.value = 2'000'000'000}}};
  const NvmlLibrary library(FAKE_NVML);
  const DeviceHealth found = health(library);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), std::nullopt);
  EXPECT_EQ(seconds_under(found, ClockLimit::sync_boost), std::nullopt);
  EXPECT_EQ(seconds_under(found, ClockLimit::software_thermal), std::nullopt);
  EXPECT_EQ(seconds_under(found, ClockLimit::hardware_thermal), 2.0);
}

TEST(Nvml, CountsAllProcessesHoweverMany) {
  fake_nvml::State& state = fresh(FAKE_NVML);
  Gpu& gpu = state.gpus[kGpu.pci_bus_id];
  gpu.compute = {{static_cast<std::uint32_t>(getpid()), 1}};
  for (std::uint32_t i = 0; i < 100; ++i) gpu.compute.push_back({3'000'000'000U + i, 10});
  gpu.graphics = {{3'000'000'000U, 10}, {2'999'999'999U, 10}};
  const NvmlLibrary library(FAKE_NVML);
  EXPECT_EQ(health(library).other_processes.value().count, 101);
  EXPECT_EQ(health(library).other_processes->memory_bytes, 1010U);
}

TEST(Nvml, TakesOneOfTheProcessesForUsWhereNumbersAreNotOurs) {
  using cuda::NvmlProcess;
  const std::vector<NvmlProcess> two{{71, 100, 0, 0}, {72, 200, 0, 0}};
  EXPECT_EQ(cuda::others_among(two, 7, true).count, 2);
  EXPECT_EQ(cuda::others_among(two, 7, true).memory_bytes, 300U);
  EXPECT_EQ(cuda::others_among(two, 7, false).count, 1);
  EXPECT_EQ(cuda::others_among(two, 7, false).memory_bytes, std::nullopt);
  EXPECT_EQ(cuda::others_among(two, 71, false).memory_bytes, 200U) << "a container that shares the host's numbers";
  EXPECT_EQ(cuda::others_among({}, 7, false).count, 0);
  const std::vector<NvmlProcess> unknown{{71, ~std::uint64_t{0}, 0, 0}};
  EXPECT_EQ(cuda::others_among(unknown, 7, true).memory_bytes, std::nullopt);
}

TEST(Nvml, LetsOnlyOneThreadIn) {
  fake_nvml::State& state = fresh(FAKE_NVML);
  const NvmlLibrary library(FAKE_NVML);
  state.delay = milliseconds(1);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { static_cast<void>(health(library)); });
  threads.clear();
  EXPECT_FALSE(state.overlapped);
}

/// The process's own library is opened once: before the first test, as a user's environment would have it.
const bool kEnvironment = setenv("PACELINE_NVML_LIBRARY", FAKE_NVML, 1) == 0;

TEST(GpuHealth, FindsItsGpuByPciAddressAndTellsCauses) {
  ASSERT_TRUE(kEnvironment);
  fake::boot({.device_count = 2});
  fake_nvml::State& state = fresh(FAKE_NVML);
  state.gpus[kGpu.pci_bus_id].clock_mhz = 1111;
  Gpu& gpu = state.gpus[kOther.pci_bus_id];
  gpu.clock_mhz = 1200;
  gpu.limits = 0x4;
  gpu.peers = {{kGpu.pci_bus_id, 0}};
  const Device device = find_device("cuda:1");
  const auto before = health_of(device);
  ASSERT_TRUE(before.has_value());
  EXPECT_EQ(before->clock_hz, 1.2e9);
  ASSERT_EQ(before->peers.size(), 1U);
  EXPECT_EQ(before->peers[0].device, "cuda:0");
  EXPECT_EQ(before->peers[0].reads, true);
  EXPECT_EQ(causes_of(*before, *before),
            std::vector<std::string>{"its clock is at 1.20 of 1.98 GHz because of the power cap of 700 W"});
  EXPECT_EQ(CudaBackend().health_source().value().version, "13.580.126.09");
  state.gpus.erase(kOther.pci_bus_id);
  EXPECT_FALSE(health_of(device).has_value());
}

// A kernel of the user: its address is all that a launch needs here.
void backward_kernel(double*, double) {}

TEST(GpuHealth, IsPartOfWhatATrainerExplains) {
  using Trainer = BasicDataParallel<double>;
  fake::boot({.device_count = 2});
  fake::set_twins();
  fake::twin(&backward_kernel, [](const fake::Launch&, double* gradients, double seconds) {
    fake::writes(gradients, sizeof(double));
    fake::takes(seconds);
  });
  fake_nvml::State& state = fresh(FAKE_NVML);
  std::vector<Device> gpus = {find_device("cuda:0"), find_device("cuda:1")};
  gpus[1].device_class = gpus[0].device_class;
  Trainer trainer(DeviceGroup(gpus), {.parameter_count = 1});
  state.gpus[kOther.pci_bus_id].compute = {{static_cast<std::uint32_t>(getpid()), 1}, {3'000'000'000U, 1ULL << 32}};
  state.gpus[kGpu.pci_bus_id].compute = state.gpus[kOther.pci_bus_id].compute;
  for (int step = 0; step < 20; ++step) {
    trainer.step(96, [](const MicroBatch& mb, Trainer::Replica& replica) {
      double* gradients = replica.gradients.data();
      double seconds = 1e-3 * static_cast<double>(mb.size()) * (replica.device_index == 0 ? 1.0 : 2.0);
      void* arguments[] = {&gradients, &seconds};
      EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&backward_kernel), dim3(1), dim3(1), arguments, 0,
                                 static_cast<cudaStream_t>(replica.stream)),
                cudaSuccess);
      return 0.0;
    });
  }
  const std::string text = trainer.explain();
  const std::size_t slow = text.find("  cuda:1: share");
  ASSERT_NE(slow, std::string::npos) << text;
  const std::string cause = "    what may slow it: another process uses it (4.0 GiB)\n";
  EXPECT_EQ(text.find(cause, slow), text.find('\n', slow) + 1) << text;
  EXPECT_EQ(text.find(cause), text.rfind(cause)) << "the other GPU is not slow\n" << text;
}

/// NVML hangs for so long as this is there, and nobody waits for it longer than 50 ms.
class Hang {
 public:
  explicit Hang(fake_nvml::State& state) : state_(state) {
    cuda::NvmlDeadline::of_process().set_limit(milliseconds(50));
    state_.hangs = true;
  }
  ~Hang() { end(); }
  Hang(const Hang&) = delete;
  Hang& operator=(const Hang&) = delete;

  /// Returns when the call that was given up has come back.
  void end() {
    state_.hangs = false;
    cuda::NvmlDeadline& deadline = cuda::NvmlDeadline::of_process();
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    deadline.set_limit(std::chrono::seconds(30));
    while (!deadline.run([] {}) && std::chrono::steady_clock::now() < give_up) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

 private:
  fake_nvml::State& state_;
};

TEST(GpuHealth, IsNoneWhileNvmlHangsAndIsBackAfterwards) {
  ASSERT_TRUE(kEnvironment);
  fake::boot({.device_count = 1});
  fake_nvml::State& state = fresh(FAKE_NVML);
  const Device device = find_device("cuda:0");
  ASSERT_TRUE(health_of(device).has_value());
  Hang hang(state);
  EXPECT_EQ(health_of(device), std::nullopt);
  EXPECT_EQ(health_of(device), std::nullopt);
  EXPECT_EQ(state.inside, 1) << "who hangs is not asked again";
  const HealthSource source = CudaBackend().health_source().value();
  EXPECT_EQ(source.why_none, "it has not answered within 0.05 s: the driver may hang; nvidia-smi would tell");
  EXPECT_TRUE(source.path.empty());
  EXPECT_EQ(gpu_facts().size(), 1U) << "what CUDA knows is told";
  hang.end();
  EXPECT_TRUE(health_of(device).has_value());
  EXPECT_EQ(CudaBackend().health_source().value().why_none, "");
}

TEST(GpuHealth, IsNotWaitedForByWhoIsInterrupted) {
  ASSERT_TRUE(kEnvironment);
  fake::boot({.device_count = 1});
  fake_nvml::State& state = fresh(FAKE_NVML);
  const Device device = find_device("cuda:0");
  ASSERT_TRUE(health_of(device).has_value());
  Hang hang(state);
  cuda::NvmlDeadline::of_process().set_limit(std::chrono::seconds(60));
  {
    const Interrupting soon;
    EXPECT_THROW(static_cast<void>(health_of(device)), Interrupt);
  }
  EXPECT_EQ(health_of(device), std::nullopt) << "it is still away, and not asked";
  EXPECT_EQ(state.inside, 1);
  hang.end();
  EXPECT_TRUE(health_of(device).has_value());
}

TEST(GpuHealth, HoldsUpNoTrainerAndNoExplanationWhereNvmlHangs) {
  using Trainer = BasicDataParallel<double>;
  fake::boot({.device_count = 2});
  fake::set_twins();
  const Hang hang(fresh(FAKE_NVML));
  Trainer trainer(DeviceGroup(std::vector<std::string>{"cuda:0", "cuda:1"}), {.parameter_count = 1});
  for (int step = 0; step < 3; ++step) {
    trainer.step(8, [](const MicroBatch&, Trainer::Replica&) { return 0.0; });
  }
  EXPECT_EQ(trainer.explain().find("what may slow it"), std::string::npos);
}

TEST(GpuHealth, IsNoneForADeviceThatIsGone) {
  fake::boot({.device_count = 1});
  fresh(FAKE_NVML);
  Device device = find_device("cuda:0");
  device.index = 3;
  EXPECT_FALSE(health_of(device).has_value());
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error of ours must not be found by somebody else's check";
}

}  // namespace
}  // namespace paceline
